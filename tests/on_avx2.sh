#!/bin/sh
# Run Python as a CPU with AVX2 and without AVX-512 and VNNI would, in child processes too:
#   tests/on_avx2.sh -m pytest tests/tasks/test_build_engine.py -k 'int8 or quantized'
# Needs Debian's package qemu-user, and root for the view of /proc/cpuinfo.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
venv=$(python -c 'import sys; print(sys.prefix)')
# Children are started with sys.executable: an environment like this one, whose interpreter is the emulator.
mkdir "$folder/bin"
cp "$venv/pyvenv.cfg" "$folder"
ln -s "$venv/lib" "$folder/lib"
cat > "$folder/bin/python" <<END
#!/bin/sh
exec qemu-x86_64 -cpu Haswell-noTSX,-pcid,-x2apic,-tsc-deadline,-invpcid -0 "\$0" "$venv/bin/python" "\$@"
END
chmod +x "$folder/bin/python"
# The emulator answers cpuid and leaves /proc/cpuinfo as it is.
sed -E '/^flags/ s/ (avx512|avx_vnni|amx_)[a-z0-9_]*//g' /proc/cpuinfo > "$folder/cpuinfo"
# shellcheck disable=SC2016
unshare --mount sh -c 'mount --bind "$0/cpuinfo" /proc/cpuinfo && exec "$0/bin/python" "$@"' "$folder" "$@"
