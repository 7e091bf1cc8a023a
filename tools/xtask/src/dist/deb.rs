//! The Debian package, made by `dpkg-deb` without debhelper.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::build::{self, Flavour};
use super::files;
use super::piece::{DistRun, PackageOutput, maintainer, write};
use crate::{TaskResult, run};

pub fn make(dist: &DistRun) -> Result<PackageOutput, String> {
    for (program, package) in [("dpkg-deb", "dpkg"), ("dpkg-shlibdeps", "dpkg-dev")] {
        if !run::have(program) {
            return Ok(PackageOutput::LeftOut(format!(
                "{program} is missing (Debian's package {package})"
            )));
        }
    }
    let program = build::program(Flavour::Shared)?;
    let arch = run::quiet(Command::new("dpkg").arg("--print-architecture"))?;
    let arch = arch.trim();
    let root = dist.empty("deb")?;
    files::lay_out(dist, &program.path, Flavour::Shared, &root, &files::DEB)?;
    let size = run::quiet(Command::new("du").args(["-sk", "--apparent-size"]).arg(&root))?;
    let size = size.split_whitespace().next().unwrap_or("0").to_owned();
    let depends = depends(dist, &root.join("usr/bin/blockhaul"))?;
    sums(&root)?;
    let control = control(dist.version, arch, &size, &depends);
    write(&root.join("DEBIAN/control"), control)?;
    for (name, text) in [("postinst", postinst()), ("prerm", prerm())] {
        let script = root.join("DEBIAN").join(name);
        write(&script, text)?;
        run::quiet(Command::new("chmod").arg("0755").arg(script))?;
    }
    let file = dist.out.join(format!("blockhaul_{}_{arch}.deb", dist.version));
    let mut pack = dist.command("dpkg-deb");
    pack.args(["--root-owner-group", "-Zxz", "--build"]).arg(&root).arg(&file);
    run::quiet(&mut pack)?;
    Ok(PackageOutput::Files(vec![file]))
}

/// The packages with the libraries that the program needs.
pub fn depends(dist: &DistRun, program: &Path) -> Result<String, String> {
    // The tool insists on a source package.
    let source = dist.empty("deb-source")?;
    write(
        &source.join("debian/control"),
        "Source: blockhaul\n\nPackage: blockhaul\nArchitecture: any\n",
    )?;
    let text =
        run::quiet(dist.command("dpkg-shlibdeps").current_dir(&source).arg("-O").arg(program))?;
    let found = text.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    found.map(str::to_owned).ok_or(format!("dpkg-shlibdeps printed no dependencies: {text}"))
}

fn control(version: &str, arch: &str, size: &str, depends: &str) -> String {
    format!(
        "Package: blockhaul\nVersion: {version}\nArchitecture: {arch}\nMaintainer: {}\n\
         Installed-Size: {size}\nDepends: {depends}\nSuggests: nbdkit, nbdkit-plugin-dev, qemu-utils\n\
         Section: admin\nPriority: optional\n\
         Description: serve, copy, back up, inspect and measure disk images over NBD\n \
         blockhaul is one program for servers and clients of NBD (Network Block Device).\n \
         It also takes the command lines of nbdkit, nbdcopy, nbdinfo, qemu-img and qemu-nbd,\n \
         if those programs are not installed, and loads plugins and filters for nbdkit.\n",
        maintainer()
    )
}

/// The file with which dpkg verifies what is installed.
fn sums(root: &Path) -> TaskResult {
    let mut command = Command::new("md5sum");
    let mut names = files::below(root)?;
    // dpkg verifies files only.
    names.retain(|name| !root.join(name).is_symlink());
    let text = run::quiet(command.current_dir(root).arg("--").args(&names))?;
    fs::create_dir_all(root.join("DEBIAN"))
        .map_err(|error| format!("cannot make {}: {error}", root.join("DEBIAN").display()))?;
    write(&root.join("DEBIAN/md5sums"), text)
}

/// Registers the names of other programs. Where such a program is installed, its file stays.
fn postinst() -> String {
    format!(
        "#!/bin/sh\nset -e\ncase $1 in\nconfigure)\n    for name in {}; do\n        \
         update-alternatives --quiet --install /usr/bin/$name $name /usr/bin/blockhaul 10\n    done\n    \
         if [ -d /run/systemd/system ]; then\n        systemd-sysusers blockhaul.conf\n        \
         systemctl daemon-reload\n    fi\n    ;;\nesac\n",
        files::NAMES.join(" ")
    )
}

fn prerm() -> String {
    format!(
        "#!/bin/sh\nset -e\ncase $1 in\nremove | deconfigure)\n    \
         if [ -d /run/systemd/system ]; then\n        \
         systemctl --quiet disable --now blockhaul.socket blockhaul.service || true\n    fi\n    \
         for name in {}; do\n        \
         update-alternatives --quiet --remove $name /usr/bin/blockhaul\n    done\n    ;;\nesac\n",
        files::NAMES.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scripts_are_valid_for_sh() {
        let scratch = tempfile::tempdir().unwrap();
        for text in [postinst(), prerm()] {
            let file = scratch.path().join("script");
            write(&file, text).unwrap();
            run::quiet(Command::new("sh").arg("-n").arg(&file)).unwrap();
        }
    }
}
