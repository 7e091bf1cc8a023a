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
    let statuses = statuses_of(path);
    command.after_long_help(format!("EXAMPLES\n  {examples}\nEXIT STATUS\n{statuses}"))
}

/// The exit statuses of a command, for its help.
pub(super) fn statuses_of(path: &str) -> String {
    let command = path.split(' ').next().unwrap_or(path);
    if exit::TABLE.iter().any(|(name, _)| *name == command) {
        return own_statuses(command);
    }
    let statuses: &[&str] = match command {
        "copy" => &COPY_STATUSES,
        "follow" | "pull" | "restore" | "verify" | "checksum" => &READ_STATUSES,
        "map" => &["0", "1", "2", "3", "4", "7"],
        "doctor" => &["0", "1", "2"],
        "chain" => &CHAIN_STATUSES,
        _ => &STATUSES,
    };
    of_table(statuses)
}

/// These statuses with their meaning.
fn of_table(statuses: &[&str]) -> String {
    let chosen = exit::TABLE.iter().filter(|(status, _)| statuses.contains(status));
    chosen.map(|(status, what)| devices::short_entry(status, what, 10)).collect()
}

/// Those of a command with statuses of its own, one in a line.
fn own_statuses(command: &str) -> String {
    let all = exit::TABLE.iter().find(|(name, _)| *name == command);
    let each = all.iter().flat_map(|(_, what)| what.split("; "));
    each.filter_map(|status| status.split_once(' '))
        .map(|(status, what)| devices::short_entry(status, what, 10))
        .collect()
}

/// The statuses of other commands that read whole disks.
const READ_STATUSES: [&str; 10] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "128+N"];

/// The statuses of `copy`.
const COPY_STATUSES: [&str; 11] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "10", "128+N"];

/// The statuses of commands that open no device but a plugin.
const STATUSES: [&str; 4] = ["0", "1", "2", "3"];

/// The statuses of commands for backups in a directory.
const CHAIN_STATUSES: [&str; 8] = ["0", "1", "2", "3", "4", "5", "6", "8"];

const EXAMPLES: &[(&str, &str)] = &[
    (
        "follow",
        "\
  Show what a plan would do, and carry it out until the downtime is at most 10 seconds:
      blockhaul follow --dry-run vm1.toml
      blockhaul follow --set downtime=10s vm1.toml
",
    ),
    (
        "check",
        "\
  Check an image that nothing else uses:
      blockhaul check vm.qcow2
  Free lost clusters, for example after a crash:
      blockhaul check --repair leaks vm.qcow2
",
    ),
    (
        "create",
        "\
  Create an image, and one over another that stays as it is:
      blockhaul create qcow2:vm.qcow2 10G
      blockhaul create 'qcow2:overlay.qcow2?backing=qcow2:vm.qcow2' 10G
",
    ),
    (
        "resize",
        "\
  Make a disk larger by 10 GiB, and the disk in an image smaller:
      blockhaul resize disk.raw +10G
      blockhaul resize --shrink qcow2:vm.qcow2 5G
",
    ),
    (
        "rebase",
        "\
  Put an image over a newer base, and then over none:
      blockhaul rebase --backing allow vm.qcow2 base-2.qcow2 --backing-format qcow2
      blockhaul rebase --backing allow --flatten vm.qcow2
  Say where a base is that was moved:
      blockhaul rebase --unsafe vm.qcow2 ../bases/base.qcow2 --backing-format qcow2
",
    ),
    (
        "commit",
        "\
  Write the changes of a trial to the disk under it:
      blockhaul commit --backing allow trial.qcow2
",
    ),
    (
        "measure",
        "\
  Print how many bytes a qcow2 image of a disk would need:
      blockhaul measure --json disk.raw | jq .required
",
    ),
    (
        "snapshot",
        "\
  List the snapshots of an image, and copy one:
      blockhaul snapshot list vm.qcow2
      blockhaul copy 'qcow2:vm.qcow2?snapshot=before' disk.raw
",
    ),
    (
        "snapshot list",
        "  List number, size and name of each snapshot:\n      blockhaul snapshot list vm.qcow2\n",
    ),
    (
        "bitmap",
        "\
  List the bitmaps of an image, and copy what one marks:
      blockhaul bitmap list vm.qcow2
      blockhaul copy --bitmap qemu:dirty-bitmap:daily qcow2:vm.qcow2 disk.raw
",
    ),
    (
        "bitmap list",
        "  List state, granularity and name of each bitmap:\n      blockhaul bitmap list vm.qcow2\n",
    ),
    (
        "bitmap add",
        "  Add a bitmap, in which QEMU marks what changes from now on:\n      blockhaul bitmap add vm.qcow2 monday\n",
    ),
    (
        "bitmap remove",
        "  Remove the bitmap of a backup that is no longer needed:\n      blockhaul bitmap remove vm.qcow2 sunday\n",
    ),
    (
        "bitmap clear",
        "  Begin again, after a full backup:\n      blockhaul bitmap clear vm.qcow2 daily\n",
    ),
    ("bitmap enable", "  Mark changes again:\n      blockhaul bitmap enable vm.qcow2 daily\n"),
    (
        "bitmap disable",
        "\
  Stop marking, so that blockhaul can write to the image:
      blockhaul bitmap disable vm.qcow2 daily
",
    ),
    (
        "bitmap merge",
        "\
  Add what two days have changed, and what a bitmap of another image marks:
      blockhaul bitmap merge vm.qcow2 week monday tuesday
      blockhaul bitmap merge --from overlay.qcow2 vm.qcow2 week wednesday
",
    ),
    (
        "help",
        "\
  The options of devices, of one layer, and of a command:
      blockhaul help devices
      blockhaul help rate
      blockhaul help copy
",
    ),
    (
        "man",
        "\
  Write all pages, for man1 and man7, and read one:
      blockhaul man pages
      man pages/blockhaul-devices.7
",
    ),
    (
        "completions",
        "\
  Complete commands and options in bash:
      blockhaul completions bash > ~/.local/share/bash-completion/completions/blockhaul
",
    ),
    (
        "chain",
        "\
  Keep the newest seven points, and check what is left:
      blockhaul chain prune vm1/vda --keep-last 7
      blockhaul chain check vm1/vda
",
    ),
    (
        "chain list",
        "\
  List the points; print the name of the newest one:
      blockhaul chain list vm1/vda
      blockhaul chain list vm1/vda --json | jq -r '.points[-1].name'
",
    ),
    (
        "chain check",
        "\
  Read and check all files, and only those of one point:
      blockhaul chain check vm1/vda
      blockhaul chain check vm1/vda --point monday
",
    ),
    (
        "chain merge",
        "\
  Remove the oldest point; the one after it is a full backup then:
      blockhaul chain merge vm1/vda
",
    ),
    (
        "chain abandon",
        "\
  Remove what an interrupted pull has left, after its source is gone:
      blockhaul chain abandon vm1/vda
",
    ),
    (
        "chain prune",
        "\
  Keep the newest seven points:
      blockhaul chain prune vm1/vda --keep-last 7
",
    ),
    ("tls", tls::EXAMPLES),
    ("tls init", tls::EXAMPLES),
    (
        "doctor",
        "\
  Show what is missing, and what to do about it:
      blockhaul doctor
      blockhaul doctor --json | jq '.facts[] | select(.state != \"good\")'
",
    ),
    (
        "plugin",
        "\
  Show a plugin by the name that nbdkit uses, and one by its path:
      blockhaul plugin curl
      blockhaul plugin ./my-plugin.so size=1G
",
    ),
    (
        "ctl clients",
        "\
  List the clients, as text and as JSON:
      blockhaul ctl /run/disks.ctl clients
      blockhaul ctl /run/disks.ctl clients --json
",
    ),
    (
        "ctl exports",
        "\
  List the exports, and the parameters of their layers:
      blockhaul ctl /run/disks.ctl exports
",
    ),
    (
        "ctl disconnect",
        "\
  Disconnect client 3 once its requests are answered; repeat to disconnect it at once:
      blockhaul ctl /run/disks.ctl disconnect 3
",
    ),
    (
        "ctl set",
        "\
  Raise a rate; change the second of two layers of the same name:
      blockhaul ctl /run/disks.ctl set a rate rate=100M
      blockhaul ctl /run/disks.ctl set a delay:2 read=10ms
",
    ),
    (
        "ctl export-add",
        "\
  Add a disk, and a read-only one that is limited to 10 MiB per second:
      blockhaul ctl /run/disks.ctl export-add b=b.raw
      blockhaul ctl /run/disks.ctl export-add c=c.raw --readonly --layer 'rate?rate=10M'
",
    ),
    (
        "ctl export-remove",
        "\
  Remove an export that is not in use, and one whose clients then get errors:
      blockhaul ctl /run/disks.ctl export-remove b
      blockhaul ctl /run/disks.ctl export-remove c --force
",
    ),
    (
        "ctl layer-add",
        "\
  Limit the rate for the time of a backup:
      blockhaul ctl /run/disks.ctl layer-add a 'rate?rate=50M'
      blockhaul ctl /run/disks.ctl layer-remove a rate
",
    ),
    (
        "ctl layer-remove",
        "\
  Remove the second rate layer, counted from the device, once its requests are complete:
      blockhaul ctl /run/disks.ctl layer-remove a rate:2 --within 5m
",
    ),
    (
        "ctl snapshot-add",
        "\
  Show a disk in use as it is now, copy that, end the snapshot:
      blockhaul ctl /run/disks.ctl snapshot-add a a-now --scratch-max 10G
  What has changed since monday, for another program, and a bitmap for the next time:
      blockhaul ctl /run/disks.ctl snapshot-add a a-now --bitmap monday --start-bitmap tuesday
      blockhaul copy 'nbd+unix:///a-now?socket=/run/disks.sock' a.raw
      blockhaul ctl /run/disks.ctl export-remove a-now
",
    ),
    (
        "ctl backup",
        "\
  Back up a disk in use to a file, with verification, and wait for the end:
      blockhaul ctl /run/disks.ctl backup a a.raw --verify --wait
  Back it up to an NBD server at 50 MiB per second, with at most 10 GiB for old contents:
      blockhaul ctl /run/disks.ctl backup a nbd://backup/a --rate 50M --scratch-max 10G
  A full backup that begins a dirty bitmap; later only what has changed since:
      blockhaul ctl /run/disks.ctl backup a a.raw --start-bitmap daily --wait
      blockhaul ctl /run/disks.ctl backup a a.raw --bitmap daily --wait
  Back up two disks of a machine at the same moment, or neither:
      blockhaul ctl /run/disks.ctl backup a a.raw --with b b.raw --wait
",
    ),
    (
        "ctl bitmap-add",
        "\
  Track writes in blocks of 4 KiB:
      blockhaul ctl /run/disks.ctl bitmap-add a tuesday --granularity 4k
",
    ),
    (
        "ctl bitmap-remove",
        "\
  Track writes in this bitmap no longer:
      blockhaul ctl /run/disks.ctl bitmap-remove a tuesday
",
    ),
    (
        "ctl bitmap-clear",
        "\
  Forget what was written until now:
      blockhaul ctl /run/disks.ctl bitmap-clear a tuesday
",
    ),
    (
        "ctl bitmap-enable",
        "\
  Mark writes again:
      blockhaul ctl /run/disks.ctl bitmap-enable a tuesday
",
    ),
    (
        "ctl bitmap-disable",
        "\
  Keep what was written until now, and nothing later:
      blockhaul ctl /run/disks.ctl bitmap-disable a tuesday
",
    ),
    (
        "ctl bitmap-merge",
        "\
  Let tuesday show what monday shows, too, after the backup of monday has failed:
      blockhaul ctl /run/disks.ctl bitmap-merge a tuesday monday
",
    ),
    (
        "ctl jobs",
        "\
  List the jobs, as text and as JSON:
      blockhaul ctl /run/disks.ctl jobs
      blockhaul ctl /run/disks.ctl jobs --json
",
    ),
    (
        "ctl job-pause",
        "\
  Pause job 1, and continue it:
      blockhaul ctl /run/disks.ctl job-pause 1
      blockhaul ctl /run/disks.ctl job-resume 1
",
    ),
    (
        "ctl job-resume",
        "\
  Continue job 1:
      blockhaul ctl /run/disks.ctl job-resume 1
",
    ),
    (
        "ctl mirror",
        "\
  Move the clients of a disk to another file, without disconnecting them:
      blockhaul ctl /run/disks.ctl mirror a new.raw --wait
      blockhaul ctl /run/disks.ctl job-complete 1 --wait
  Copy a disk to another host until it is the same there, and leave the clients here:
      blockhaul ctl /run/disks.ctl mirror a nbds://other.example/a --wait
      blockhaul ctl /run/disks.ctl job-complete 1 --stay --wait
",
    ),
    (
        "ctl job-complete",
        "\
  Move the clients to the target of job 1 if they need not wait longer than 200 ms:
      blockhaul ctl /run/disks.ctl job-complete 1 --within 200ms --wait
",
    ),
    (
        "ctl job-finalize",
        "\
  Back up a disk, check the copy, and then end the job:
      blockhaul ctl /run/disks.ctl backup a a-backup.raw --no-auto-finalize
      blockhaul ctl /run/disks.ctl job-finalize 1
",
    ),
    (
        "ctl job-cancel",
        "\
  Cancel job 1:
      blockhaul ctl /run/disks.ctl job-cancel 1
",
    ),
    (
        "ctl job-rate",
        "\
  Limit job 1 to 20 MiB per second, then not at all:
      blockhaul ctl /run/disks.ctl job-rate 1 20M
      blockhaul ctl /run/disks.ctl job-rate 1 0
",
    ),
    (
        "ctl job-copy-mode",
        "\
  Clients write faster than mirror job 1 copies: let it catch up:
      blockhaul ctl /run/disks.ctl job-copy-mode 1 write-blocking
",
    ),
    (
        "ctl job-wait",
        "\
  Wait for job 1; the exit status is that of the job:
      blockhaul ctl /run/disks.ctl job-wait 1
  Wait until the mirror of job 1 could complete:
      blockhaul ctl /run/disks.ctl job-wait 1 --ready
",
    ),
    (
        "ctl reload",
        "\
  Use a renewed certificate:
      blockhaul ctl /run/disks.ctl reload
",
    ),
    (
        "ctl metrics",
        "\
  Print the metrics:
      blockhaul ctl /run/disks.ctl metrics
",
    ),
    (
        "ctl drain",
        "\
  Wait until the last client has left and the server has exited:
      blockhaul ctl /run/disks.ctl drain --wait
",
    ),
    (
        "ctl stop",
        "\
  Stop the server, and wait until it has exited, for five minutes at most:
      blockhaul ctl /run/disks.ctl stop --wait --timeout 5m
",
    ),
];
