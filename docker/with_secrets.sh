#!/bin/sh
# For every variable SECRET_NAME, set NAME to the content of the file that it names; then run the command.
set -eu
for name in $(env | sed -n 's/^SECRET_\([A-Z0-9_]*\)=.*/\1/p'); do
    file=$(printenv "SECRET_$name")
    if [ ! -s "$file" ]; then
        echo "SECRET_$name names $file, which is missing or empty. Write it with: sh docker/make_secrets.sh" >&2
        exit 1
    fi
    export "$name=$(cat "$file")"
done
exec "$@"
