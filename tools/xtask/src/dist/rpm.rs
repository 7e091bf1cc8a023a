//! The RPM package, made by `rpmbuild` from a tree that is laid out already.

use std::collections::BTreeSet;
use std::path::Path;

use super::build::{self, Flavour};
use super::files;
use super::piece::{DistRun, PackageOutput, maintainer, write};
use crate::run;

pub fn make(dist: &DistRun) -> Result<PackageOutput, String> {
    if !run::have("rpmbuild") {
        return Ok(PackageOutput::LeftOut("rpmbuild is missing (Debian's package rpm)".into()));
    }
    let program = build::program(Flavour::Shared)?;
    let top = dist.empty("rpm")?;
    let tree = top.join("tree");
    files::lay_out(dist, &program.path, Flavour::Shared, &tree, &files::RPM)?;
    let names: Vec<String> =
        files::below(&tree)?.iter().map(|path| format!("/{}", path.display())).collect();
    let spec = top.join("blockhaul.spec");
    let dirs = own_directories(&names);
    write(&spec, text(dist.version, &dirs, &names))?;
    let mut pack = dist.command("rpmbuild");
    pack.args(["-bb", "--quiet"]).arg(&spec);
    let settings = [
        ("_topdir", top.display().to_string()),
        ("_rpmdir", top.join("out").display().to_string()),
        ("tree", tree.display().to_string()),
        ("packager", maintainer()),
        ("_buildhost", "localhost".into()),
    ];
    for (name, value) in settings {
        pack.arg("--define").arg(format!("{name} {value}"));
    }
    run::quiet(&mut pack)?;
    let arch = std::env::consts::ARCH;
    let name = format!("blockhaul-{}-1.{arch}.rpm", dist.version);
    let made = top.join("out").join(arch).join(&name);
    let file = dist.out.join(&name);
    files::install(&made, &file, 0o644)?;
    Ok(PackageOutput::Files(vec![file]))
}

/// Directories that every system has.
const COMMON: &[&str] = &[
    "/",
    "/usr",
    "/usr/bin",
    "/usr/include",
    "/usr/lib",
    "/usr/lib/systemd",
    "/usr/lib/systemd/system",
    "/usr/sbin",
    "/usr/share",
    "/usr/share/doc",
    "/usr/share/man",
    "/usr/share/man/man1",
    "/usr/share/man/man7",
];

/// The other directories of files. The package owns them, too, as rpm removes only what is owned.
fn own_directories(names: &[String]) -> BTreeSet<String> {
    let above = names.iter().flat_map(|name| Path::new(name).ancestors().skip(1));
    let above = above.map(|dir| dir.display().to_string());
    above.filter(|dir| !COMMON.contains(&dir.as_str())).collect()
}

/// The spec file. Libraries that the program needs are found by rpmbuild.
fn text(version: &str, dirs: &BTreeSet<String>, names: &[String]) -> String {
    let alternatives = |arguments: &str| {
        format!(
            "for name in {}; do\n    update-alternatives {arguments} >/dev/null 2>&1 || :\ndone\n",
            files::NAMES.join(" ")
        )
    };
    // Stripped already, and dated by the commit. The module file is for those who write plugins.
    format!(
        "%define __os_install_post %{{nil}}\n%define debug_package %{{nil}}\n\
         %define _build_id_links none\n%define use_source_date_epoch_as_buildtime 1\n\
         %global __requires_exclude ^(pkgconfig[(].*|/usr/bin/pkg-config)$\n\
         %define clamp_mtime_to_source_date_epoch 1\n\n\
         Name: blockhaul\nVersion: {version}\nRelease: 1\n\
         Summary: Serve, copy, back up, inspect and measure disk images over NBD\n\
         License: MIT OR Apache-2.0\nPackager: %{{packager}}\n\n%description\n\
         blockhaul is one program for servers and clients of NBD (Network Block Device).\n\
         It also takes the command lines of nbdkit, nbdcopy, nbdinfo, qemu-img and qemu-nbd,\n\
         if those programs are not installed, and loads plugins and filters for nbdkit.\n\n\
         %install\nmkdir -p %{{buildroot}}\ncp -a %{{tree}}/. %{{buildroot}}/\n\n\
         %post\n{}\n%preun\nif [ $1 = 0 ]; then\n{}fi\n\n%files\n%defattr(-,root,root)\n\
         {}{}\n",
        alternatives("--install /usr/bin/$name $name /usr/bin/blockhaul 10"),
        alternatives("--remove $name /usr/bin/blockhaul"),
        dirs.iter().map(|dir| format!("%dir {dir}\n")).collect::<String>(),
        names.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternatives_stay_when_the_package_is_updated() {
        let names = ["/usr/bin/blockhaul".to_owned(), "/usr/share/a/b/c".to_owned()];
        let spec = text("1.2.3", &own_directories(&names), &names);
        let removal = spec.split_once("%preun\n").unwrap().1;
        assert!(removal.starts_with("if [ $1 = 0 ]; then\n"), "{removal}");
        let files =
            "\n%dir /usr/share/a\n%dir /usr/share/a/b\n/usr/bin/blockhaul\n/usr/share/a/b/c\n";
        assert!(spec.ends_with(files), "{spec}");
    }
}
