#!/bin/sh
# Which torch does this machine need, and why? Prints the one command, and runs it unless --dry-run is given.
#
#   sh install_pytorch.sh --dry-run
#   sh install_pytorch.sh --dry-run --gpu "GTX 1080" --driver 470.82.01 --python 3.10 --glibc 2.31
#
# --driver, --gpu, --python VERSION, --glibc, --os, --arch and --accelerator describe another machine: then nothing is
# installed. --python PATH names the interpreter to install into. The table is facts/torch_wheels.json; it is read with
# Python's standard library alone (3.9 or newer), and PyTorch itself needs a Python.
# Exit codes: 0 a build fits (and was installed), 1 none fits or pip failed, 2 wrong usage, 3 no Python.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
dry=no
elsewhere=no
machine=no
into=

say() {
    printf '%s\n' "$*" >&2
}

version_of() {
    "$1" -c 'import sys; t = not getattr(sys, "_is_gil_enabled", lambda: True)(); print("%d.%d%s" % (sys.version_info[0], sys.version_info[1], "t" if t else ""))' 2>/dev/null
}

reads_table() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1
}

# The flags are kept as they are for Python; a path given with --python is the interpreter and not a version.
count=$#
while [ "$count" -gt 0 ]; do
    flag=$1
    shift
    count=$((count - 1))
    case $flag in
        --dry-run) dry=yes ;;
        --json) machine=yes ; set -- "$@" --json ;;
        -h | --help) set -- "$@" --help ; dry=yes ;;
        --python | --python=*)
            case $flag in
                *=*) value=${flag#*=} ;;
                *)
                    if [ "$count" -eq 0 ]; then
                        say "error: --python needs a version such as 3.12, or the path of an interpreter"
                        exit 2
                    fi
                    value=$1
                    shift
                    count=$((count - 1))
                    ;;
            esac
            case $value in
                [0-9]*) elsewhere=yes ; set -- "$@" --python "$value" ;;
                *)
                    into=$(command -v "$value" || true)
                    if [ -z "$into" ]; then
                        say "error: --python $value: no such program; give a version such as 3.12 or the path of an interpreter"
                        exit 2
                    fi
                    ;;
            esac
            ;;
        --gpu | --driver | --glibc | --os | --arch | --accelerator)
            if [ "$count" -eq 0 ]; then
                say "error: $flag needs a value"
                exit 2
            fi
            [ "$flag" = --accelerator ] || elsewhere=yes
            set -- "$@" "$flag" "$1"
            shift
            count=$((count - 1))
            ;;
        --gpu=* | --driver=* | --glibc=* | --os=* | --arch=*) elsewhere=yes ; set -- "$@" "$flag" ;;
        *) set -- "$@" "$flag" ;;
    esac
done

# Into which interpreter: --python, the active environment, python3 on PATH.
if [ -z "$into" ]; then
    for candidate in "${VIRTUAL_ENV:-}/bin/python" "${VIRTUAL_ENV:-}/Scripts/python.exe" "${CONDA_PREFIX:-}/bin/python" \
        "${CONDA_PREFIX:-}/python.exe" "$(command -v python3 || true)" "$(command -v python || true)"; do
        case $candidate in /bin/python | /Scripts/python.exe | /python.exe) continue ;; esac
        if [ -n "$candidate" ] && version_of "$candidate" >/dev/null; then
            into=$candidate
            break
        fi
    done
fi

# Which one reads the table: any Python from 3.9 on.
reader=
for candidate in "$into" python3 python3.15 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 python; do
    if [ -n "$candidate" ] && reads_table "$candidate"; then
        reader=$candidate
        break
    fi
done
if [ -z "$reader" ]; then
    if [ -n "$into" ]; then
        say "error: $into is Python $(version_of "$into"); this script needs 3.9 or newer to read its table."
    else
        say "error: no Python was found; this script reads its table with Python's standard library."
    fi
    say "PyTorch needs Python too: install one from 3.11 to 3.15 (https://www.python.org/downloads/, or your package manager)."
    exit 3
fi

if [ "$elsewhere" = no ] && [ -n "$into" ]; then
    set -- "$@" --python "$(version_of "$into")"
    # pip takes another build of the same version for the wanted one: what is there has to be known
    there=$("$into" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
    [ -z "$there" ] || set -- "$@" --installed "$there"
fi
table() {
    PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 "$reader" -m preflight.hardware.torch_command "$@"
}

status=0
if [ "$elsewhere" = no ] && [ -n "$into" ]; then
    table --interpreter "$into" "$@" || status=$?
else
    table "$@" || status=$?
fi
[ "$status" -eq 0 ] || exit "$status"
if [ "$dry" = yes ] || [ "$machine" = yes ]; then
    exit 0
fi
if [ "$elsewhere" = yes ]; then
    say "Nothing is installed: the flags describe another machine."
    exit 0
fi

if [ "$("$into" -c 'import os, sys, sysconfig; print(sys.prefix == sys.base_prefix and os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")))')" = True ]; then
    say "Not installed: $into belongs to the operating system, which does not let pip change it (PEP 668)."
    say "Make an environment first: $into -m venv .venv && . .venv/bin/activate && sh $0"
    exit 1
fi
arguments=$(table --arguments "$@")
[ -n "$arguments" ] || exit 0
# One argument a line, none of them with spaces.
set -f
IFS='
'
# shellcheck disable=SC2086
set -- $arguments
unset IFS
if "$into" -m pip --version >/dev/null 2>&1; then
    exec "$into" -m pip install "$@"
elif command -v uv >/dev/null 2>&1; then
    exec uv pip install --python "$into" "$@"
fi
say "Not installed: $into has no pip. Run: $into -m ensurepip --upgrade"
exit 1
