//! What stands behind the options of commands of commands, and of those that take no device: examples
//! and exit statuses. The other commands have theirs with their options.

use super::tls;
use crate::{devices, exit};

/// Adds the sections to every command that lacks them; `path` is its name with those above it.
pub(super) fn complete(command: clap::Command, path: &str) -> clap::Command {
    let names: Vec<String> =
        command.get_subcommands().map(|inner| inner.get_name().to_string()).collect();
    let command = names.into_iter().fold(command, |command, name| {
        let path = format!("{path} {name}");
        command.mut_subcommand(name, |inner| complete(inner, path.trim_start()))
    });
    let found = EXAMPLES.iter().find(|(name, _)| *name == path);
    let Some((_, examples)) = found.filter(|_| command.get_after_long_help().is_none()) else {
        return command;
    };
    let statuses = match path.strip_prefix("ctl ") {
        Some(_) => ctl_statuses(),
        None => exit::TABLE
            .iter()
            .filter(|(status, _)| STATUSES.contains(status))
            .map(|(status, what)| devices::entry(status, what, 10))
            .collect(),
    };
    command.after_long_help(format!("EXAMPLES\n  {examples}\nEXIT STATUS\n{statuses}"))
}

/// Those of `ctl`, one in a line.
fn ctl_statuses() -> String {
    let all = exit::TABLE.iter().find(|(command, _)| *command == "ctl");
    let each = all.iter().flat_map(|(_, what)| what.split("; "));
    each.filter_map(|status| status.split_once(' '))
        .map(|(status, what)| devices::entry(status, what, 10))
        .collect()
}

/// The statuses of commands that open no device but a plugin.
const STATUSES: [&str; 4] = ["0", "1", "2", "3"];

const EXAMPLES: [(&str, &str); 15] = [
    ("tls", tls::EXAMPLES),
    ("tls init", tls::EXAMPLES),
    (
        "plugin",
        "\
  What nbdkit's plugin for curl can do, and one that is given by its file:
      blockhaul plugin curl
      blockhaul plugin ./my-plugin.so size=1G
",
    ),
    (
        "ctl clients",
        "\
  Who is there, for people and for scripts:
      blockhaul ctl /run/disks.ctl clients
      blockhaul ctl /run/disks.ctl clients --json
",
    ),
    (
        "ctl exports",
        "\
  What is served, and the parameters of its layers:
      blockhaul ctl /run/disks.ctl exports
",
    ),
    (
        "ctl disconnect",
        "\
  The third client leaves once its requests are answered, or at once if it is told twice:
      blockhaul ctl /run/disks.ctl disconnect 3
",
    ),
    (
        "ctl set",
        "\
  Faster, and the second of two layers of one name slower:
      blockhaul ctl /run/disks.ctl set a rate rate=100M
      blockhaul ctl /run/disks.ctl set a delay:2 read=10ms
",
    ),
    (
        "ctl export-add",
        "\
  Another disk; one that clients may only read, at most 10 MiB a second:
      blockhaul ctl /run/disks.ctl export-add b=b.raw
      blockhaul ctl /run/disks.ctl export-add c=c.raw --readonly --layer 'rate?rate=10M'
",
    ),
    (
        "ctl export-remove",
        "\
  An export that nobody uses, and one whose clients get errors from now on:
      blockhaul ctl /run/disks.ctl export-remove b
      blockhaul ctl /run/disks.ctl export-remove c --force
",
    ),
    (
        "ctl layer-add",
        "\
  A limit for the time of a backup:
      blockhaul ctl /run/disks.ctl layer-add a 'rate?rate=50M'
      blockhaul ctl /run/disks.ctl layer-remove a rate
",
    ),
    (
        "ctl layer-remove",
        "\
  The second rate from the storage on, once its requests have ended:
      blockhaul ctl /run/disks.ctl layer-remove a rate:2 --within 5m
",
    ),
    (
        "ctl reload",
        "\
  After a certificate was renewed:
      blockhaul ctl /run/disks.ctl reload
",
    ),
    (
        "ctl metrics",
        "\
  What Prometheus would see:
      blockhaul ctl /run/disks.ctl metrics
",
    ),
    (
        "ctl drain",
        "\
  Go on when the last client has left and the server has ended:
      blockhaul ctl /run/disks.ctl drain --wait
",
    ),
    (
        "ctl stop",
        "\
  Stop, and go on when the server has ended, for five minutes at most:
      blockhaul ctl /run/disks.ctl stop --wait --timeout 5m
",
    ),
];
