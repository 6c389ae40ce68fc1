# Sourced by the scripts beside it. `ensure_venv [EXTRA]` makes .venv with this project in it, and does nothing
# when it is there already; `$root` and `$python` then name the project and the interpreter. `other_venv NAME
# REQUIREMENT...` before it: another folder than .venv, with these packages too.
#
# .venv/.installed-* holds what was installed: the project's path (a copied .venv would still point at the
# original), the version, pyproject.toml, the constraints and the further packages. Anything else there, and pip
# runs again.
# Written for bash 3.2 (macOS), and without flock(1), which is not everywhere.
# shellcheck shell=bash

unset PYTHONHOME PYTHONPATH
root=$(CDPATH='' cd -P -- "${BASH_SOURCE[0]%/*}/.." && pwd -P)
venv=.venv
python=$root/$venv/bin/python
requirements=()

other_venv() { # NAME REQUIREMENT...
    venv=$1
    python=$root/$venv/bin/python
    shift
    requirements=("$@")
}

find_python() {
    local name found=''
    for name in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
        # A name may be on the PATH and still not run (pyenv shims, the Windows store), so ask it.
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
                printf '%s\n' "$name"
                return
            fi
            found=$name
        fi
    done
    if [[ -n $found ]]; then
        echo "Error: $found has no venv module." >&2
        echo "Hint: on Debian and Ubuntu install its package, for example: apt install python3-venv" >&2
    else
        echo "Error: no Python 3.11 or newer was found." >&2
        echo "Hint: install one (https://www.python.org/downloads/), or name it: PYTHON=/path/to/python3 $0" >&2
    fi
    return 1
}

_wanted() {
    local line
    printf '%s\n' "$root"
    while IFS= read -r line; do
        if [[ $line == __version__* ]]; then printf '%s\n' "$line"; fi
    done <"$root/smartcache/__init__.py"
    printf '%s\n' "$(<"$root/pyproject.toml")" "$(<"$root/scripts/constraints.txt")" \
        ${requirements[@]+"${requirements[@]}"}
}

_is_installed() { # EXTRA; what has more serves too: the test extra has diffusers, and that has all that none has
    local stamp=$root/$venv/.installed-$1
    if [[ -f $stamp && $(<"$stamp") == "$(_wanted)" ]] && "$python" -c '' 2>/dev/null; then return; fi
    case $1 in
    '') _is_installed diffusers ;;
    diffusers) _is_installed test ;;
    *) return 1 ;;
    esac
}

_is_ours() { # made for this path, and with an interpreter that still runs
    [[ -f $root/$venv/.root && $(<"$root/$venv/.root") == "$root" ]] &&
        "$python" -m pip --version >/dev/null 2>&1
}

_show_progress() { # what pip is at, in one line that is gone at the end; nothing where nobody watches
    local line text begun=$SECONDS
    if [[ -t 2 ]]; then printf '    0 s  Preparing' >&2; fi
    while IFS= read -r line; do
        case $line in
        *Collecting\ * | *Downloading\ *) text=${line#"${line%%[! ]*}"} text=${text%% (*} ;;
        Installing\ collected*) text='Unpacking' ;;
        *) continue ;;
        esac
        if [[ -t 2 ]]; then printf '\r\033[K  %3d s  %.60s' "$((SECONDS - begun))" "$text" >&2; fi
    done
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
}

_install() { # EXTRA PYTHON
    local extra=$1 base=$2 stamp=$root/$venv/.installed-$1 wanted
    wanted=$(_wanted)
    if ! _is_ours; then
        echo "Making $venv with $("$base" --version) ..." >&2
        # All but the lock file, on which other processes may be waiting.
        find "$root/$venv" -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} + || return
        "$base" -m venv "$root/$venv" || return
        printf '%s\n' "$root" >"$root/$venv/.root"
    fi
    echo "Installing smartcache${extra:+ with its $extra tools} into $venv ..." >&2
    rm -f "$stamp"
    # Of the project's earlier name: left there, it would be taken for somebody else's package.
    "$python" -m pip uninstall --yes --quiet --disable-pip-version-check smartcache >/dev/null 2>&1 || true
    # --upgrade: "the newest 1.x" is not what an older one, asked for before, has left there.
    (cd -- "$root" && PIP_USER=0 "$python" -m pip install ${requirements[@]+--upgrade} --disable-pip-version-check --no-input \
        --progress-bar off -c scripts/constraints.txt -e ".${extra:+[$extra]}" ${requirements[@]+"${requirements[@]}"}) 2>&1 |
        tee "$root/$venv/.pip.log" | _show_progress
    if ((PIPESTATUS[0])); then
        tail -n 30 "$root/$venv/.pip.log" >&2
        return 1
    fi
    # Under its own name only when complete: others look at it without the lock.
    printf '%s\n' "$wanted" >"$stamp.new" && mv -f "$stamp.new" "$stamp"
}

ensure_venv() { # [EXTRA]
    local extra=${1-} base status=0
    if _is_installed "$extra"; then return; fi
    base=$(find_python) || return
    mkdir -p "$root/$venv" || return
    # The kernel lock belongs to descriptor 9, which stays open here after that Python has ended.
    exec 9>>"$root/$venv/.lock" || return
    if ! "$base" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
        echo "Waiting for another process that is making $venv ..." >&2
        "$base" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || return
    fi
    if ! _is_installed "$extra"; then _install "$extra" "$base" || status=$?; fi
    exec 9>&-
    if ((status)); then
        echo "Error: $venv could not be made." >&2
        echo "Hint: the lines above say why; it is safe to run this again, or to remove $venv first." >&2
    fi
    return "$status"
}
