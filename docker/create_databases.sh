#!/bin/sh
# Create a user and a database for each server; PostgreSQL's image runs this once, on an empty volume.
set -eu
for name in prefect mlflow; do
    NAME=$name PASSWORD=$(cat "${SECRETS:-/run/secrets}/${name}_database_password") \
        psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username postgres --dbname postgres <<'SQL'
\getenv name NAME
\getenv password PASSWORD
CREATE ROLE :"name" LOGIN PASSWORD :'password';
CREATE DATABASE :"name" OWNER :"name";
REVOKE CONNECT ON DATABASE :"name" FROM PUBLIC;
SQL
done
