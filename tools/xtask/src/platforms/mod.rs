//! `cargo xtask platforms`: runs blockhaul with real platforms, each in a Debian root of its own.

mod root;
mod table;

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{TaskResult, enter, run};
use root::Root;
use table::Row;

pub const HELP: &str = "\
cargo xtask platforms [--roots DIR] [--write] [NAME…]

Runs blockhaul with the programs that it is made for: libvirt with a guest, also by the timer of systemd,
virtnbdbackup, Incus, Linux's nbd module in a guest, virt-v2v, and the newest nbdkit, libnbd and QEMU. Prints a
table: the platform, its version, what was done, and whether all bytes were equal. With NAMEs, only those
platforms; `--list` names them.

  --roots DIR   where the roots are [default: target/platforms]
  --write       write the table into docs/platforms.md, with the date of today
  --list        list the platforms

A root is made from the mirror of this machine's own apt sources, once (2 to 5 minutes, 1 to 3 GB). It needs root
and debootstrap. The mounts of a root exist for this command only. Guests are emulated where there is no KVM: a
platform takes 1 to 10 minutes. `timer` backs up 5 times, once a minute, and 15 times with BLOCKHAUL_LONG=1.
";

/// A platform: a module of tests in `tests/tests/all/platforms`, and the roots that it needs.
struct Platform {
    /// Name of the module, with `-` for `_`.
    name: &'static str,
    roots: &'static [&'static Root],
}

/// Every platform, the quickest ones first.
const PLATFORMS: &[Platform] = &[
    Platform { name: "newest-peers", roots: &[&root::SID] },
    Platform { name: "incus", roots: &[&root::BACKPORTS] },
    Platform { name: "kernel-nbd", roots: &[&root::BACKPORTS] },
    Platform { name: "libvirt", roots: &[&root::BACKPORTS] },
    Platform { name: "timer", roots: &[&root::BACKPORTS] },
    Platform { name: "virtnbdbackup", roots: &[&root::BACKPORTS] },
    Platform { name: "virt-v2v", roots: &[&root::BACKPORTS, &root::SID, &root::GUEST] },
];

/// Names the directory of the roots to the tests.
const ROOTS: &str = "BLOCKHAUL_PLATFORMS";
/// Set in the mount namespace of the roots.
const INSIDE: &str = "BLOCKHAUL_PLATFORMS_NAMESPACE";

/// Arguments of the command.
struct Options {
    roots: PathBuf,
    write: bool,
    list: bool,
    names: Vec<String>,
}

pub fn main(args: &[String]) -> TaskResult {
    let options = parse(args)?;
    if options.list {
        PLATFORMS.iter().for_each(|platform| println!("{}", platform.name));
        return Ok(());
    }
    if env::var_os(INSIDE).is_none() {
        return in_namespace(args);
    }
    let chosen = chosen(&options.names)?;
    let mut rows = Vec::new();
    let mut failed = Vec::new();
    for platform in chosen {
        match platform.run(&options.roots) {
            Ok(found) => rows.extend(found),
            Err(why) => {
                println!("{}: {why}", platform.name);
                failed.push(platform.name);
                rows.push(Row::failed(platform.name));
            }
        }
    }
    print!("{}", table::text(&rows));
    if options.write {
        table::write(&rows)?;
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

fn parse(args: &[String]) -> Result<Options, String> {
    let mut options = Options {
        roots: run::target().join("platforms"),
        write: false,
        list: false,
        names: Vec::new(),
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--roots" => options.roots = args.next().ok_or("--roots needs a directory")?.into(),
            "--write" => options.write = true,
            "--list" => options.list = true,
            option if option.starts_with('-') => {
                return Err(format!("unknown option '{option}' (see --help)"));
            }
            name => options.names.push(name.to_owned()),
        }
    }
    Ok(options)
}

/// The platforms of these names, or all.
fn chosen(names: &[String]) -> Result<Vec<&'static Platform>, String> {
    if let Some(name) = names.iter().find(|name| PLATFORMS.iter().all(|one| one.name != **name)) {
        return Err(format!("there is no platform '{name}' (see --list)"));
    }
    let is_chosen = |one: &&Platform| names.is_empty() || names.iter().any(|name| name == one.name);
    Ok(PLATFORMS.iter().filter(is_chosen).collect())
}

/// Runs this command again in a mount namespace of its own: the mounts of the roots end with it.
fn in_namespace(args: &[String]) -> TaskResult {
    if !enter::is_root() {
        return Err("platforms need root: they mount, and change their root directory".into());
    }
    let exe = env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private"]).arg(exe).arg("platforms").args(args);
    run::show(command.env(INSIDE, "1"))
}

impl Platform {
    /// Makes the root and runs the tests of this platform; gives the rows that they print.
    fn run(&self, roots: &Path) -> Result<Vec<Row>, String> {
        for root in self.roots {
            root.make(roots)?;
        }
        let mut command = run::loud_cargo("test");
        let module = format!("platforms::{}::", self.name.replace('-', "_"));
        command.args(["-q", "-p", "blockhaul-tests", "--test", "all", "--", "--nocapture"]);
        command.args(["--test-threads", "1", &module]).env(ROOTS, roots);
        run::announce(&command);
        let output = command.output().map_err(|error| format!("cannot start cargo: {error}"))?;
        let printed = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            return Err(format!("{printed}{}", String::from_utf8_lossy(&output.stderr)));
        }
        let rows = table::rows(&printed);
        if rows.is_empty() {
            return Err(format!("no test ran: {}", String::from_utf8_lossy(&output.stderr)));
        }
        Ok(rows)
    }
}
