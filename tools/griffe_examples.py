"""Extension of mkdocs.yml: show the `Example:` section of a docstring as code; griffe calls it `Examples:`."""

from __future__ import annotations

from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename the section before griffe parses it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
