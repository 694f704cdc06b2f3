# setup.sh -- sourced by run-tests and run-demo: make .venv and install the package into it, once.
#
# PYTHON names the interpreter to make .venv with (default python3). The install is keyed by a hash
# of everything that it depends on, so a second run starts at once.
# shellcheck shell=bash

readonly python=${PYTHON:-python3}
readonly venv=.venv

die() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    shift
    (($# == 0)) || printf '  %s\n' "$@" >&2
    exit 1
}

# The state of everything that an install of these extras depends on.
sources_hash() {
    {
        "$venv/bin/python" -VV
        find pyproject.toml tools/constraints.txt shmcache/_version.py native -type f \
            ! -name '*.o' ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum
    } | sha256sum
}

check_python() { # MINOR WHY
    command -v "$python" >/dev/null || die "'$python' is not there. Install Python 3.$1 or newer, or set PYTHON."
    "$python" -c "import sys; sys.exit(sys.version_info < (3, $1))" ||
        die "$("$python" -V) is too old: $2 needs 3.$1. Set PYTHON to a newer one."
}

# Python.h, found and compiled just as the build of the package will do it.
check_compiler() {
    local compiler include
    compiler=${CC:-$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')}
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    command -v "${compiler%% *}" >/dev/null ||
        die "no C compiler: '${compiler%% *}' is not there." "Install gcc or clang (Debian: build-essential), or set CC."
    # shellcheck disable=SC2086 # CC may hold options
    echo '#include <Python.h>' | $compiler -I"$include" -fsyntax-only -x c - 2>/dev/null ||
        die "'$compiler' cannot compile against Python.h in $include." \
            "Install the headers of $("$python" -V) (Debian: python3-dev) and of the C library."
}

# quietly LOG WHAT COMMAND...: run it with its output in LOG; on a terminal, count the seconds.
quietly() {
    local log=$1 what=$2 pid began=$SECONDS status=0
    shift 2
    "$@" >>"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; printf "\n%s: interrupted\n" "${0##*/}" >&2; exit 130' INT TERM
    if [[ -t 1 ]]; then
        while kill -0 "$pid" 2>/dev/null; do
            printf '\r%s ... %d s ' "$what" $((SECONDS - began))
            sleep 1
        done
    else
        printf '%s ... ' "$what"
    fi
    wait "$pid" || status=$?
    trap - INT TERM
    printf '%s\n' "$([[ $status == 0 ]] && echo done || echo failed)"
    return "$status"
}

# ensure EXTRA MIB [PACKAGE...]: shmcache with that extra in .venv; PACKAGEs come without what they ask for.
ensure() {
    local extra=$1 need_mib=$2 stamp log free
    shift 2
    stamp=$venv/$extra-stamp log=$venv/$extra-install.log
    if [[ -x $venv/bin/python && -f $stamp && $(sources_hash) == "$(<"$stamp")" ]]; then return; fi
    check_compiler
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$("$python" -V) has no venv module. Install it (Debian: python3-venv)."
    free=$(df -Pm . | awk 'NR == 2 {print $4}')
    ((free >= need_mib)) || die "the install needs about $need_mib MiB here, $free MiB are free."
    [[ -x $venv/bin/python ]] || "$python" -m venv "$venv" || die "could not make $venv with '$python -m venv'."
    : >"$log"
    echo "Installing into $venv; this takes some minutes, once. Details: $log"
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check -c tools/constraints.txt)
    if ! quietly "$log" "  shmcache (compiled here) and the $extra extra" "${pip[@]}" -e ".[$extra]" ||
        { (($#)) && ! quietly "$log" "  $*" "${pip[@]}" --no-deps "$@"; }; then
        tail -n 15 "$log" >&2
        die "the install failed; above are the last lines of $log." \
            "If they speak of connections or of no matching distribution: pip needs a network or a mirror."
    fi
    sources_hash >"$stamp"
}
