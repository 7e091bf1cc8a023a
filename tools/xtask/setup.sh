# Sourced by ./try and ./test: installs what a build needs, after saying what that is.
#
# Programs come from the distribution's packages (Debian and Ubuntu, by apt-get), the Rust toolchain from
# rustup where cargo is absent or older than the workspace demands. Nothing is installed that is there.

# say TEXT…: one line about what is being done.
say() {
    printf '%s\n' "$*" >&2
}

# fail TEXT…: says why nothing can go on, and ends with status 1.
fail() {
    say "$name: $*"
    exit 1
}

# confirm QUESTION: whether the user agrees. With --yes they do; without a terminal nobody can be asked.
confirm() {
    [ "$yes" = no ] || return 0
    [ -t 0 ] || fail "$1 Run '$name --yes' to agree without being asked."
    printf '%s [y/N] ' "$1" >&2
    local answer
    read -r answer
    case $answer in [yY] | [yY][eE][sS]) return 0 ;; esac
    return 1
}

# The packages that must be installed, of those in "$@": pairs of a program (or an absolute path, or '=file', a
# file that the C compiler finds, or '@module', a module that pkg-config knows) and the package that has it.
missing_packages() {
    local entry what package found=()
    for entry in "$@"; do
        what=${entry%%:*} package=${entry##*:}
        case $what in
        =*) command -v cc >/dev/null && [ "$(cc -print-file-name="${what#=}")" != "${what#=}" ] && continue ;;
        @*) command -v pkg-config >/dev/null && pkg-config --exists "${what#@}" && continue ;;
        /*) [ -e "$what" ] && continue ;;
        *) command -v "$what" >/dev/null && continue ;;
        esac
        case " ${found[*]-} " in *" $package "*) ;; *) found+=("$package") ;; esac
    done
    printf '%s' "${found[*]-}"
}

# install_packages ENTRY…: installs the packages of those entries that are missing.
install_packages() {
    local missing root=()
    missing=$(missing_packages "$@")
    [ -n "$missing" ] || return 0
    command -v apt-get >/dev/null ||
        fail "these Debian packages, or what your distribution calls them, are missing: $missing. Install them and run $name again."
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null ||
            fail "missing packages: $missing. Install them as root (apt-get install $missing) and run $name again."
        confirm "Install these packages with sudo: $missing?" ||
            fail "missing packages: $missing. Install them and run $name again."
        root=(sudo)
    fi
    say "$name: installing packages: $missing"
    "${root[@]}" apt-get update -qq >/dev/null ||
        fail "the package lists cannot be read (apt-get update failed). Check the network and the package sources."
    # shellcheck disable=SC2086 # A list of words.
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive DEBCONF_NOWARNINGS=yes \
        apt-get install -qq -y --no-install-recommends $missing >/dev/null ||
        fail "apt-get could not install: $missing."
}

# Whether version $1 is at least version $2.
at_least() {
    [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]
}

# The version of cargo, or nothing where it does not run.
cargo_version() {
    command -v cargo >/dev/null || return 0
    cargo --version 2>/dev/null | sed -n 's/^cargo \([0-9.]*\).*/\1/p'
}

# install_rust: makes cargo of at least the workspace's version available.
install_rust() {
    local needed found how
    needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    # A toolchain that an earlier run has installed.
    [ ! -r "${CARGO_HOME:-$HOME/.cargo}/env" ] || . "${CARGO_HOME:-$HOME/.cargo}/env"
    found=$(cargo_version)
    if [ -n "$found" ] && at_least "$found" "$needed"; then
        return 0
    fi
    how="Rust $needed or later is needed, and ${found:+only }${found:-none} is installed."
    if command -v rustup >/dev/null; then
        confirm "$how Install the stable toolchain with rustup?" || fail "$how"
        say "$name: installing the stable Rust toolchain with rustup"
        rustup --quiet toolchain install stable --profile minimal ||
            fail "$how rustup could not fetch the stable toolchain. Check the network, or install Rust in another way."
        export RUSTUP_TOOLCHAIN=stable
    else
        confirm "$how Install it for this user with rustup (https://rustup.rs)?" || fail "$how"
        install_packages curl:curl /etc/ssl/certs/ca-certificates.crt:ca-certificates
        say "$name: installing Rust with rustup"
        curl --proto '=https' --tlsv1.2 -fsS https://sh.rustup.rs |
            sh -s -- -y --quiet --profile minimal --no-modify-path >/dev/null ||
            fail "$how It could not be fetched from rustup.rs. Check the network, or put cargo $needed or later on the PATH."
        . "${CARGO_HOME:-$HOME/.cargo}/env"
    fi
    found=$(cargo_version)
    [ -n "$found" ] && at_least "$found" "$needed" || fail "$how"
}

# What every build needs: the linker and the C library's own files, and OpenSSL, which TLS links.
build_needs=(
    cc:gcc
    as:binutils
    =crt1.o:libc6-dev
    pkg-config:pkg-config
    @openssl:libssl-dev
)
