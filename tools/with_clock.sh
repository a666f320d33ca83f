#!/bin/sh
# Run a long silent command. On a terminal its first line counts the seconds; otherwise it is printed once. The command's
# output follows, and its exit status is kept.
# Usage: tools/with_clock.sh TEXT COMMAND [ARGUMENT...]
set -u
text=${1:?usage: tools/with_clock.sh TEXT COMMAND [ARGUMENT...]}
shift
if ! [ -t 1 ]; then
  echo "$text"
  exec "$@"
fi

output=$(mktemp)
printf '\r%s: 0 s ' "$text"  # before the command, which may end before the first check
"$@" >"$output" 2>&1 &
command=$!
trap 'kill "$command" 2>/dev/null; rm -f "$output"; echo; exit 130' INT TERM HUP
seconds=0
while kill -0 "$command" 2>/dev/null; do
  sleep 1
  seconds=$((seconds + 1))
  printf '\r%s: %d s ' "$text" "$seconds"
done
wait "$command"
status=$?
printf '\n'
cat "$output"
rm -f "$output"
exit "$status"
