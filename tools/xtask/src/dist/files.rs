//! What a package installs, laid out below a directory.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::build::Flavour;
use super::licenses;
use super::piece::{DistRun, sorted, write};
use crate::{TaskResult, run};

/// Names under which the program takes the command lines of other programs.
pub const NAMES: [&str; 9] = [
    "nbdkit",
    "nbdcopy",
    "nbddiscard",
    "nbddump",
    "nbdinfo",
    "nbdzero",
    "qemu-img",
    "qemu-nbd",
    "qemu-storage-daemon",
];

/// systemd's units.
const UNITS: [&str; 8] = [
    "blockhaul.service",
    "blockhaul.socket",
    "blockhaul-mount.service",
    "blockhaul-pull@.service",
    "blockhaul-pull@.timer",
    "blockhaul-restore-test@.service",
    "blockhaul-restore-test@.timer",
    "blockhaul-failed@.service",
];

/// The paths that differ between kinds of packages, relative to the tree's root.
pub struct PackageLayout {
    /// What the other paths of `bin`, `share` and `include` are below: `usr`, or nothing.
    pub prefix: &'static str,
    /// zsh's completions.
    pub zsh: &'static str,
    /// Licences, README and changelog.
    pub doc: &'static str,
    /// The file with the licences of the program itself.
    pub licence: &'static str,
    /// systemd's units.
    pub units: &'static str,
    /// Whether manual pages are compressed.
    pub compressed: bool,
}

pub const DEB: PackageLayout = PackageLayout {
    prefix: "usr",
    zsh: "usr/share/zsh/vendor-completions",
    doc: "usr/share/doc/blockhaul",
    licence: "copyright",
    units: "usr/lib/systemd/system",
    compressed: true,
};

pub const RPM: PackageLayout =
    PackageLayout { zsh: "usr/share/zsh/site-functions", licence: "LICENSE", ..DEB };

pub const TARBALL: PackageLayout = PackageLayout {
    prefix: "",
    zsh: "share/zsh/site-functions",
    doc: "share/doc/blockhaul",
    licence: "LICENSE",
    units: "lib/systemd/system",
    compressed: false,
};

/// Lays out the program and everything that belongs to it below `root`.
pub fn lay_out(
    dist: &DistRun,
    program: &Path,
    flavour: Flavour,
    root: &Path,
    layout: &PackageLayout,
) -> TaskResult {
    let prefix = root.join(layout.prefix);
    let source = run::workspace();
    install(program, &prefix.join("bin/blockhaul"), 0o755)?;
    manual_pages(dist, program, &prefix.join("share/man"), layout.compressed)?;
    completions(program, root, &prefix, layout)?;
    let units = source.join("examples/systemd");
    helper(&prefix)?;
    for name in UNITS {
        install(&units.join(name), &root.join(layout.units).join(name), 0o644)?;
    }
    if flavour == Flavour::Shared {
        let header = source.join("crates/devices/cabi/include/blockhaul-plugin.h");
        install(&header, &prefix.join("include/blockhaul-plugin.h"), 0o644)?;
        let text = pkg_config(dist.version, layout.prefix);
        write(&prefix.join("share/pkgconfig/blockhaul.pc"), text)?;
    }
    if layout.prefix == "usr" {
        write(&root.join("usr/lib/sysusers.d/blockhaul.conf"), SYSUSERS)?;
    }
    documents(flavour, root, layout)?;
    same_modes(root)
}

/// The name under which mount(8) starts the program.
fn helper(prefix: &Path) -> TaskResult {
    let dir = prefix.join("sbin");
    let name = "mount.blockhaul";
    let made = fs::create_dir_all(&dir)
        .and_then(|()| std::os::unix::fs::symlink("../bin/blockhaul", dir.join(name)));
    made.map_err(|error| format!("cannot make {}: {error}", dir.join(name).display()))
}

/// The account that the unit runs as.
const SYSUSERS: &str = "u blockhaul - \"Network block devices\" /var/lib/blockhaul\n";

fn manual_pages(dist: &DistRun, program: &Path, dir: &Path, compressed: bool) -> TaskResult {
    let fresh = dist.empty("man")?;
    run::quiet(Command::new(program).arg("man").arg(&fresh))?;
    for page in sorted(&fresh)? {
        let section = page.extension().unwrap_or_default().display();
        let name = page.file_name().unwrap_or_default();
        let place = dir.join(format!("man{section}")).join(name);
        install(&page, &place, 0o644)?;
        if compressed {
            compress(&place)?;
        }
    }
    Ok(())
}

fn completions(program: &Path, root: &Path, prefix: &Path, layout: &PackageLayout) -> TaskResult {
    for (shell, place) in [
        ("bash", prefix.join("share/bash-completion/completions/blockhaul")),
        ("zsh", root.join(layout.zsh).join("_blockhaul")),
        ("fish", prefix.join("share/fish/vendor_completions.d/blockhaul.fish")),
    ] {
        write(&place, run::quiet(Command::new(program).args(["completions", shell]))?)?;
    }
    Ok(())
}

/// The module file for plugins in C. Their header includes nbdkit's.
fn pkg_config(version: &str, prefix: &str) -> String {
    // A tarball may be unpacked anywhere: pkg-config knows where the file is.
    let prefix = if prefix.is_empty() { "${pcfiledir}/../.." } else { "/usr" };
    format!(
        "prefix={prefix}\nincludedir=${{prefix}}/include\n\nName: blockhaul\n\
         Description: Header for asynchronous plugins of blockhaul\nVersion: {version}\n\
         Requires: nbdkit\nCflags: -I${{includedir}}\n"
    )
}

fn documents(flavour: Flavour, root: &Path, layout: &PackageLayout) -> TaskResult {
    let source = run::workspace();
    let doc = root.join(layout.doc);
    let read = |name: &str| {
        fs::read_to_string(source.join(name))
            .map_err(|error| format!("cannot read {name}: {error}"))
    };
    let mit = read("LICENSE-MIT")?;
    let apache = read("LICENSE-APACHE")?;
    write(&doc.join(layout.licence), licenses::own(&mit, &apache, layout.licence == "copyright"))?;
    write(&doc.join("third-party"), licenses::third_party(flavour)?)?;
    install(&source.join("README.md"), &doc.join("README.md"), 0o644)?;
    let changelog = doc.join("changelog");
    install(&source.join("CHANGELOG.md"), &changelog, 0o644)?;
    if layout.compressed {
        compress(&changelog)?;
        compress(&doc.join("third-party"))?;
    }
    if flavour == Flavour::Static {
        write(&doc.join("STATIC"), STATIC)?;
    }
    Ok(())
}

/// What users of the static program must know.
pub const STATIC: &str = "\
This program is linked statically. It needs no library, and runs in a root file system with nothing else. Servers
in brackets ([ CMD ]) and --run need /bin/sh and /tmp.

It does not load shared objects: plugins and filters for nbdkit (nbdkit:PLUGIN, blockhaul plugin) are missing.
Scripts (sh:, eval:) and other programs ([ CMD ]) work. Its OpenSSL is compiled in: updates of the system's
OpenSSL do not change it. It reads certificates of authorities from /etc/ssl, or from where SSL_CERT_FILE and
SSL_CERT_DIR lead.
";

pub fn install(from: &Path, to: &Path, mode: u32) -> TaskResult {
    let bytes =
        fs::read(from).map_err(|error| format!("cannot read {}: {error}", from.display()))?;
    write(to, bytes)?;
    set_mode(to, mode)
}

fn set_mode(path: &Path, mode: u32) -> TaskResult {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(|error| format!("cannot set the mode of {}: {error}", path.display()))
}

/// Replaces a file by one with `.gz` added to its name; no date is stored.
fn compress(path: &Path) -> TaskResult {
    run::quiet(Command::new("gzip").args(["-9", "-n", "-f"]).arg(path)).map(drop)
}

/// Gives directories 0755 and files 0644 or 0755, whatever the umask.
fn same_modes(dir: &Path) -> TaskResult {
    set_mode(dir, 0o755)?;
    for path in sorted(dir)? {
        if path.is_dir() {
            same_modes(&path)?;
        } else {
            let mode = fs::metadata(&path).map(|data| data.permissions().mode()).unwrap_or(0);
            set_mode(&path, if mode & 0o100 == 0 { 0o644 } else { 0o755 })?;
        }
    }
    Ok(())
}

/// All files below a directory, relative to it, sorted.
pub fn below(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for path in sorted(dir)? {
        if path.is_dir() && !path.is_symlink() {
            let name = path.file_name().map(PathBuf::from).unwrap_or_default();
            found.extend(below(&path)?.into_iter().map(|inner| name.join(inner)));
        } else if let Some(name) = path.file_name() {
            found.push(PathBuf::from(name));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_and_compression_do_not_depend_on_the_umask() {
        let scratch = tempfile::tempdir().unwrap();
        let plain = scratch.path().join("a/plain");
        let program = scratch.path().join("a/program");
        write(&plain, "text").unwrap();
        write(&program, "").unwrap();
        set_mode(&plain, 0o600).unwrap();
        set_mode(&program, 0o711).unwrap();
        same_modes(scratch.path()).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&plain), mode(&program)), (0o644, 0o755));
        compress(&plain).unwrap();
        let all = below(scratch.path()).unwrap();
        assert_eq!(all, [Path::new("a/plain.gz"), Path::new("a/program")]);
    }

    #[test]
    fn the_mount_helper_is_the_program() {
        let scratch = tempfile::tempdir().unwrap();
        write(&scratch.path().join("bin/blockhaul"), "program").unwrap();
        helper(scratch.path()).unwrap();
        let helper = scratch.path().join("sbin/mount.blockhaul");
        assert_eq!(fs::read_to_string(helper).unwrap(), "program");
    }

    #[test]
    fn the_module_file_of_a_tarball_can_be_moved() {
        assert!(pkg_config("1.2.3", "").starts_with("prefix=${pcfiledir}/../..\n"));
        assert!(pkg_config("1.2.3", "usr").starts_with("prefix=/usr\n"));
        assert!(pkg_config("1.2.3", "usr").contains("\nVersion: 1.2.3\n"));
    }
}
