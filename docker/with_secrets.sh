#!/bin/sh
# Put the content of the file that SECRET_NAME names into NAME, for every such variable, and go on with the command.
set -eu
for name in $(env | sed -n 's/^SECRET_\([A-Z0-9_]*\)=.*/\1/p'); do
    file=$(printenv "SECRET_$name")
    if [ ! -s "$file" ]; then
        echo "SECRET_$name names $file, which is missing or empty: sh docker/make_secrets.sh writes it." >&2
        exit 1
    fi
    export "$name=$(cat "$file")"
done
exec "$@"
