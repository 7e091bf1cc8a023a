//! systemd as the first process of a root, in namespaces of its own, with units of a test only.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use blockhaul_testkit::tools::{until, until_some};

use super::{Process, Root, succeeded};

/// Enters a control group and new namespaces: arguments are the root, the directory of the units, the mount of
/// the control groups, the name of the group, and [`BOOT`].
const ENTER: &str = r#"set -eu
mkdir "$3"
mount -t cgroup2 cgroup2 "$3"
mkdir "$3/$4"
echo $$ > "$3/$4/cgroup.procs"
exec unshare --mount --propagation private --pid --fork --kill-child --cgroup --uts --ipc \
    sh -c "$5" sh "$1" "$2"
"#;

/// Makes the root a file system of its own, which units with namespaces need, and starts systemd. It sees no unit of the
/// root, has a `/run` of its own with the sockets of libvirt, and can change neither the kernel's settings nor the clock.
const BOOT: &str = r#"set -eu
root=$1
mount --rbind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --bind run/libvirt mnt
mount -t tmpfs tmpfs run
mkdir run/lock run/libvirt
mount --move mnt run/libvirt
pivot_root . .
exec chroot . /bin/sh -euc 'umount -l .; exec "$@"' sh \
    setpriv --bounding-set=-sys_time,-sys_module,-sys_boot,-sys_rawio /usr/bin/env -i \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin container=other SYSTEMD_UNIT_PATH="$2" \
    SYSTEMD_GENERATOR_PATH=/nonexistent /usr/lib/systemd/systemd --system --log-target=journal --show-status=no
"#;

/// Targets that units refer to; here they order nothing.
const TARGETS: &[&str] = &["basic", "default", "network-online", "shutdown", "sysinit", "timers"];

/// The journal, whose units are those of the root.
const JOURNAL: &[&str] = &["systemd-journald.socket", "systemd-journald.service"];

/// A running systemd.
pub struct Systemd {
    /// Ended first.
    process: Option<Process>,
    /// The first process, as this machine numbers it.
    first: String,
    groups: PathBuf,
    group: PathBuf,
}

impl Systemd {
    /// Starts it with the units in a directory of `/tmp`.
    #[track_caller]
    pub fn start(root: &Root, scratch: &Path, units: &Path) -> Systemd {
        for name in TARGETS {
            let target = format!("[Unit]\nDescription={name}\nDefaultDependencies=no\n");
            fs::write(units.join(format!("{name}.target")), target).unwrap();
        }
        for name in JOURNAL {
            let unit = root.path("/usr/lib/systemd/system").join(name);
            fs::copy(unit, units.join(name)).unwrap();
        }
        let groups = scratch.join("groups");
        let name = format!("blockhaul-{}", std::process::id());
        let group = groups.join(&name);
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", "sh", "-c", ENTER, "sh"]);
        command.arg(root.path("/")).arg(units).arg(&groups).args([&name, BOOT]);
        let process = Process::start(command, &scratch.join("systemd.log"));
        let list = format!("/proc/{0}/task/{0}/children", process.0.id());
        let first = until_some("systemd has begun", || {
            let listed = fs::read_to_string(&list).ok()?;
            listed.split_whitespace().find(|child| is_systemd(child)).map(String::from)
        });
        let systemd = Systemd { process: Some(process), first, groups, group };
        until("systemd answers", || {
            let output = systemd.command("systemctl").args(["show", "-P", "Version"]).output();
            output.is_ok_and(|output| output.status.success())
        });
        systemd.systemctl(&["start", JOURNAL[0], JOURNAL[1]]);
        systemd
    }

    /// A command in its namespaces.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.first, "--mount", "--pid", "--root", "--wd", "--"]);
        command.args(["/usr/bin/env", "-i", "LANG=C.UTF-8"]).arg(program);
        command
    }

    /// Runs systemctl, which has to succeed; gives what it printed.
    #[track_caller]
    pub fn systemctl(&self, args: &[&str]) -> String {
        succeeded(self.command("systemctl").args(args))
    }

    /// The messages of a unit in the journal.
    #[track_caller]
    pub fn journal(&self, unit: &str) -> String {
        succeeded(self.command("journalctl").arg("--sync"));
        succeeded(self.command("journalctl").args(["--output", "cat", "--unit", unit]))
    }

    /// Property of a unit.
    #[track_caller]
    pub fn property(&self, unit: &str, name: &str) -> String {
        self.systemctl(&["show", "--property", name, "--value", unit]).trim().into()
    }

    /// The control group of a service that is an instance of a template.
    #[track_caller]
    pub fn instance_group(&self, unit: &str) -> PathBuf {
        self.group.join("system.slice").join(self.property(unit, "Slice")).join(unit)
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        self.process.take();
        until("the processes of systemd have ended", || remove_group(&self.group).is_ok());
        let _ = Command::new("umount").arg(&self.groups).status();
    }
}

/// Whether a process has become systemd.
fn is_systemd(process: &str) -> bool {
    fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name.trim() == "systemd")
}

/// Removes a control group and those in it.
fn remove_group(dir: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_group(&entry.path())?;
        }
    }
    fs::remove_dir(dir)
}
