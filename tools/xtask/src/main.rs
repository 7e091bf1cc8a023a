//! `cargo xtask`: the developer's tasks. One table of commands; each command has its own file.

mod apt;
mod bench;
mod circles;
mod dist;
mod enter;
mod fuzz;
mod guard;
mod libnbd_python;
mod libnbd_suite;
mod links;
mod lint;
mod names;
mod nbdkit_bench;
mod nbdkit_suite;
mod npm_tools;
mod pages;
mod peers;
mod places;
mod platforms;
mod protocol;
mod python_tools;
mod qemu_suite;
mod races;
mod rows;
mod run;
mod rust_files;
mod simulate;
mod site;
mod source;
mod suite;
mod test;
mod test_programs;

use std::process::ExitCode;

/// The result of a task: nothing, or one line with what failed, where, and a remedy.
type TaskResult = Result<(), String>;

/// A subcommand: its name, its line in the overview, its own help, and what runs it.
struct Task {
    name: &'static str,
    summary: &'static str,
    help: &'static str,
    run: fn(&[String]) -> TaskResult,
}

/// Every subcommand, in the order of the overview. To add one, add a file and a line here.
const TASKS: &[Task] = &[
    Task {
        name: "peers",
        summary: "unpack the peer programs (nbdkit, libnbd, QEMU, fio) into target/peers",
        help: peers::HELP,
        run: peers::main,
    },
    Task {
        name: "test",
        summary: "peers, then build everything and run every test",
        help: test::HELP,
        run: test::main,
    },
    Task {
        name: "lint",
        summary: "formatting, clippy, documentation, and where unsafe code may stand",
        help: lint::HELP,
        run: lint::main,
    },
    Task { name: "ci", summary: "lint, then test", help: CI_HELP, run: ci },
    Task {
        name: "bench",
        summary: "measure blockhaul next to the peers",
        help: bench::HELP,
        run: bench::main,
    },
    Task {
        name: "pages",
        summary: "make the pages of the benchmark results",
        help: pages::HELP,
        run: pages::main,
    },
    Task {
        name: "dist",
        summary: "packages: deb, rpm, tarballs, container image, lists of crates",
        help: dist::HELP,
        run: dist::main,
    },
    Task {
        name: "site",
        summary: "the documentation as a site, with its links checked",
        help: site::HELP,
        run: site::main,
    },
    Task {
        name: "fuzz",
        summary: "fuzz the parsers, coverage-guided where the toolchain allows",
        help: fuzz::HELP,
        run: fuzz::main,
    },
    Task {
        name: "races",
        summary: "what threads share, a million rounds under ThreadSanitizer",
        help: races::HELP,
        run: races::main,
    },
    Task {
        name: "simulate",
        summary: "server, client and engine in virtual time, with faults by a seed",
        help: simulate::HELP,
        run: simulate::main,
    },
    Task {
        name: "protocol",
        summary: "where each requirement of the protocol is implemented and tested",
        help: protocol::HELP,
        run: protocol::main,
    },
    Task {
        name: "libnbd-suite",
        summary: "libnbd's own tests of nbdcopy and nbdinfo, with blockhaul in their place",
        help: libnbd_suite::HELP,
        run: libnbd_suite::main,
    },
    Task {
        name: "libnbd-python",
        summary: "the tests of libnbd's Python module, with blockhaul.nbd in its place",
        help: libnbd_python::HELP,
        run: libnbd_python::main,
    },
    Task {
        name: "platforms",
        summary: "libvirt, Incus, virtnbdbackup, virt-v2v, nbd.ko in a guest, each in a root of its own",
        help: platforms::HELP,
        run: platforms::main,
    },
    Task {
        name: "nbdkit-suite",
        summary: "nbdkit's own shell tests, with blockhaul in its place",
        help: nbdkit_suite::HELP,
        run: nbdkit_suite::main,
    },
    Task {
        name: "qemu-suite",
        summary: "QEMU's own tests of images, with blockhaul in the place of qemu-img and qemu-nbd",
        help: qemu_suite::HELP,
        run: qemu_suite::main,
    },
    Task {
        name: "nbdkit-source",
        summary: "nbdkit's source package, for its plugins of old versions",
        help: source::HELP,
        run: source::main,
    },
];

const CI_HELP: &str = "\
cargo xtask ci

Runs `cargo xtask lint` and then `cargo xtask test`.
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, rest)) = args.split_first() else {
        eprint!("{}", overview());
        return ExitCode::from(2);
    };
    if matches!(name.as_str(), "help" | "--help" | "-h") {
        print!("{}", overview());
        return ExitCode::SUCCESS;
    }
    let Some(task) = TASKS.iter().find(|task| task.name == name) else {
        let known: Vec<&str> = TASKS.iter().map(|task| task.name).collect();
        eprintln!("xtask: no command '{name}'; the commands are {}", known.join(", "));
        return ExitCode::from(2);
    };
    // What follows `--` belongs to the program that the task runs.
    let own = rest.iter().take_while(|arg| *arg != "--");
    if own.clone().any(|arg| arg == "--help" || arg == "-h") {
        print!("{}", task.help);
        return ExitCode::SUCCESS;
    }
    match (task.run)(rest) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("xtask {name}: {why}");
            ExitCode::FAILURE
        }
    }
}

fn ci(args: &[String]) -> TaskResult {
    run::no_more(args)?;
    lint::main(&[])?;
    test::main(&[])
}

fn overview() -> String {
    let mut text = String::from("cargo xtask COMMAND [OPTIONS]\n\n");
    for task in TASKS {
        text += &format!("  {:14}{}\n", task.name, task.summary);
    }
    text + "\n`cargo xtask COMMAND --help` tells more.\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overview_names_every_task_once_and_helps_say_how_to_call_it() {
        let text = overview();
        for task in TASKS {
            assert_eq!(text.matches(&format!("\n  {} ", task.name)).count(), 1, "{}", task.name);
            assert!(task.help.starts_with(&format!("cargo xtask {}", task.name)), "{}", task.name);
        }
    }
}
