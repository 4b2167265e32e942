#!/bin/sh
# Prints the path of a Python that this project can be installed with; finds none: says why, exits 1.
#
#   sh .ci/find_python.sh           looks on PATH, under version managers, then asks uv
#   sh .ci/find_python.sh PYTHON    judges that one only
#
# A candidate counts only after it has run: a version manager's shim exists and still fails, and a
# distribution's Python may lack the modules that a virtual environment needs.

# In order of preference. array_record has no wheels for newer ones.
VERSIONS="3.12 3.13 3.14"

# Python 2 must be able to read this, too: it has to answer that it is too old.
# _base_executable leads out of a virtual environment, so .venv is never made from itself.
PROBE='
import sys
sys.path = [p for p in sys.path if p]
minor = "%d.%d" % sys.version_info[:2]
if minor not in sys.argv[1].split():
    sys.exit("is %s, not one of %s" % (minor, sys.argv[1]))
if sys.implementation.name != "cpython" or sys.maxsize < 2**32:
    sys.exit("is not a 64-bit CPython, and wheels exist for no other")
import sysconfig
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("is free-threaded, and not all wheels exist for that")
for name in "venv", "ensurepip", "ssl", "zlib", "ctypes":
    try:
        __import__(name)
    except ImportError:
        sys.exit("lacks the module %s (Debian, Ubuntu: apt install python%s-venv)" % (name, minor))
print("%s %s" % (minor, getattr(sys, "_base_executable", None) or sys.executable))
'

# "3.12 /real/path" on standard output, or the reason on standard error.
probe() {
    "$1" -E -s -c "$PROBE" "$VERSIONS" </dev/null
}

on_path() {
    old_ifs=$IFS
    IFS=:
    set -f
    for folder in $PATH; do
        for version in $(printf '%s' "$VERSIONS" | tr ' ' ':') 3 ''; do
            printf '%s\n' "${folder:-.}/python$version"
        done
    done
    set +f
    IFS=$old_ifs
}

under_version_managers() {
    home=${HOME:-/nonexistent}
    share=${XDG_DATA_HOME:-$home/.local/share}
    printf '%s\n' \
        "${PYENV_ROOT:-$home/.pyenv}"/versions/*/bin/python \
        "${ASDF_DATA_DIR:-$home/.asdf}"/installs/python/*/bin/python \
        "${MISE_DATA_DIR:-$share/mise}"/installs/python/*/bin/python \
        "${UV_PYTHON_INSTALL_DIR:-$share/uv/python}"/*/bin/python
    for conda in "${CONDA_PREFIX:-}" "$home"/miniconda3 "$home"/anaconda3 "$home"/miniforge3 \
        "$home"/mambaforge "${MAMBA_ROOT_PREFIX:-$home/micromamba}"; do
        [ -n "$conda" ] && printf '%s\n' "$conda"/bin/python "$conda"/envs/*/bin/python
    done
}

known_to_uv() {
    command -v uv >/dev/null 2>&1 || return 0
    for version in $VERSIONS; do
        uv python find --system "$version" 2>/dev/null </dev/null
    done
}

# Sets found, or adds to refused. Of several good ones the most preferred version wins, and among
# equals the first.
found=
refused=
choose() {
    best=99
    while IFS= read -r candidate; do
        [ -f "$candidate" ] && [ -x "$candidate" ] || continue
        if answer=$(probe "$candidate" 2>&1); then
            rank=1
            for version in $VERSIONS; do
                [ "$version" = "${answer%% *}" ] && break
                rank=$((rank + 1))
            done
            if [ "$rank" -lt "$best" ]; then
                best=$rank
                found=${answer#* }
            fi
            [ "$best" -eq 1 ] && return
        else
            case $answer in
            "is "* | "lacks "*) ;;
            *) answer="does not run" ;;
            esac
            refused="$refused
    $candidate $answer"
        fi
    done
}

if [ -n "${1:-}" ]; then
    if ! candidate=$(command -v -- "$1"); then
        echo "PYTHON=$1: there is no such program." >&2
        exit 1
    fi
    choose <<EOF
$candidate
EOF
    if [ -z "$found" ]; then
        echo "PYTHON=$1 cannot be used:${refused:- it is not an executable file}" >&2
        exit 1
    fi
    printf '%s\n' "$found"
    exit
fi

choose <<EOF
$(on_path)
$(under_version_managers)
$(known_to_uv)
EOF

if [ -z "$found" ] && command -v uv >/dev/null 2>&1; then
    echo "No Python of $VERSIONS is installed: asking uv for 3.12 (this needs the network)." >&2
    uv python install 3.12 >&2 </dev/null
    choose <<EOF
$(known_to_uv)
EOF
fi

if [ -z "$found" ]; then
    cat >&2 <<EOF
This project needs a Python of $VERSIONS, and none was found on PATH, under pyenv, asdf, mise or
conda, or through uv.${refused:+ Looked at:}$refused
Get one in any of these ways, then run make again:
    uv python install 3.12
    pyenv install 3.12
    apt install python3.12 python3.12-venv      (Debian, Ubuntu)
    the installer of python.org                 (macOS)
or name one: make PYTHON=/path/to/python3.12 ...
EOF
    exit 1
fi
printf '%s\n' "$found"
