#!/bin/sh
# keep_log.sh OBJECT COMMAND...: runs a compilation, shows what it says and keeps that in OBJECT.log.
log="$1.log"
shift
"$@" >"$log" 2>&1
status=$?
cat "$log" >&2
exit $status
