"""What can be set of a kernel's launch, and the file that says what has been measured to be best; knows no kernel."""
