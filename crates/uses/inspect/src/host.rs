//! The facts of this machine that devices and commands need, each with a remedy where it is not right.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use rustix::process::Resource;
use serde::Serialize;

/// Least free memory in bytes for one copy: what it may have in flight, and the program itself.
const MEMORY_MIN: u64 = 128 << 20;
/// Least number of open files for connections and files of several exports.
const FILES_MIN: u64 = 1024;
/// Least number of open files for one copy with one connection to each side.
const FILES_NEEDED: u64 = 32;
/// Least memory in bytes that may be locked: what rings of io_uring register, and on kernels before 5.12 the rings.
const LOCKED_MIN: u64 = 8 << 20;
/// Where shared libraries are.
const LIBRARY_FOLDERS: [&str; 6] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/lib/vmware-vix-disklib/lib64",
];

/// Whether a fact of the machine is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum HostState {
    /// It is right.
    Good,
    /// Something is absent that only some devices or commands need, or that makes them slower.
    Limited,
    /// Something is wrong that every command needs.
    Wrong,
}

/// A fact of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostFact {
    /// The name of the fact, in lower case.
    pub name: &'static str,
    /// Whether it is right.
    pub state: HostState,
    /// The fact, for users.
    pub value: String,
    /// The next step of the user; `None`: there is none.
    pub remedy: Option<String>,
}

impl HostFact {
    fn good(name: &'static str, value: impl Into<String>) -> HostFact {
        HostFact { name, state: HostState::Good, value: value.into(), remedy: None }
    }

    /// A fact that is right if `is_good`, and else in this state with this remedy.
    fn checked(
        name: &'static str,
        value: impl Into<String>,
        is_good: bool,
        (state, remedy): (HostState, &str),
    ) -> HostFact {
        let fact = HostFact::good(name, value);
        if is_good { fact } else { HostFact { state, remedy: Some(remedy.to_string()), ..fact } }
    }
}

/// The facts of this machine: kernel, user, limits, memory, and programs and libraries that some devices need.
/// Blocks for file system accesses only.
pub fn host_facts() -> Vec<HostFact> {
    let limited = HostState::Limited;
    // Looked at once: the memory of a ring is freed some time after its end.
    let has_uring = blockhaul_io::uring_available().is_ok();
    let mut facts = vec![kernel(), user(), io_uring(has_uring), fuse(), open_files()];
    facts.push(locked_memory(has_uring));
    facts.extend([free_memory(), temporary_folder()]);
    facts.extend([
        program("nbdkit", "only its plugins need it: install the package nbdkit"),
        program("ssh", "only nbd+ssh: needs it: install the package openssh-client"),
        library("librbd", "librbd.so", "only disks of Ceph need it: install the package librbd1"),
        library(
            "VDDK",
            "libvixDiskLib.so",
            "only vddk: needs it: install VMware's VDDK, and give its directory as libdir",
        ),
    ]);
    let nbd = Path::new("/sys/module/nbd").exists();
    let remedy = "only /dev/nbd needs it; mount needs FUSE: modprobe nbd";
    let value = if nbd { "loaded" } else { "not loaded" };
    facts.push(HostFact::checked("kernel module nbd", value, nbd, (limited, remedy)));
    facts
}

fn kernel() -> HostFact {
    let name = rustix::system::uname();
    let [release, machine] = [name.release(), name.machine()].map(|text| text.to_string_lossy());
    HostFact::good("kernel", format!("{release} {machine}"))
}

fn user() -> HostFact {
    let user = rustix::process::geteuid();
    let remedy =
        "block devices of this machine and ports below 1024 may need root, or the group disk";
    let value = if user.is_root() { "root".to_string() } else { format!("uid {}", user.as_raw()) };
    HostFact::checked("user", value, user.is_root(), (HostState::Limited, remedy))
}

fn io_uring(there: bool) -> HostFact {
    let value = if there {
        "available"
    } else {
        "refused: epoll and threads are used, which costs more time"
    };
    let remedy = if limit(Resource::Memlock).is_some_and(|bytes| bytes < LOCKED_MIN) {
        "allow more locked memory: ulimit -l 8192 (as root beyond the hard limit), or LimitMEMLOCK=8M in a unit"
    } else {
        "allow it with sysctl kernel.io_uring_disabled=0, and in the seccomp profile of a container"
    };
    HostFact::checked("io_uring", value, there, (HostState::Limited, remedy))
}

fn fuse() -> HostFact {
    let device = Path::new("/dev/fuse");
    let may_use = rustix::fs::access(device, Access::READ_OK | Access::WRITE_OK).is_ok();
    let helper = in_path("fusermount3").is_some() || rustix::process::geteuid().is_root();
    let (value, remedy) = match (device.exists(), may_use, helper) {
        (false, ..) => (
            "/dev/fuse is absent",
            "only mount needs it: modprobe fuse, or give the device to the container",
        ),
        (_, false, _) => {
            ("/dev/fuse cannot be opened", "only mount needs it: check its permissions")
        }
        (.., false) => ("fusermount3 is absent", "only mount needs it: install the package fuse3"),
        _ => ("available", ""),
    };
    HostFact::checked("FUSE", value, remedy.is_empty(), (HostState::Limited, remedy))
}

fn limit(resource: Resource) -> Option<u64> {
    rustix::process::getrlimit(resource).current
}

/// A limit in words; none is unlimited.
fn limit_text(limit: Option<u64>, unit: &str) -> String {
    limit.map_or_else(|| "unlimited".to_string(), |limit| format!("{limit}{unit}"))
}

fn open_files() -> HostFact {
    let files = limit(Resource::Nofile);
    let is_good = files.is_none_or(|files| files >= FILES_MIN);
    let is_little = files.is_some_and(|files| files < FILES_NEEDED);
    let state = if is_little { HostState::Wrong } else { HostState::Limited };
    let remedy = "servers of many clients, jobs of many disks and images with many extents in files need more: raise it with \
         ulimit -n 4096 (as root beyond the hard limit), or LimitNOFILE=4096 in a unit";
    HostFact::checked("open files", limit_text(files, ""), is_good, (state, remedy))
}

/// The kernel counts the locked memory of all programs of a user, unless they may lock any amount: one ring that can
/// be made now says little about several programs.
fn locked_memory(has_uring: bool) -> HostFact {
    let bytes = limit(Resource::Memlock);
    let is_free = has_uring && rustix::process::geteuid().is_root();
    let is_good = is_free || bytes.is_none_or(|bytes| bytes >= LOCKED_MIN);
    let remedy = "io_uring of all programs of this user together needs it; else copies and servers use threads: raise it \
                  with ulimit -l 8192 (as root beyond the hard limit), or LimitMEMLOCK=8M in a unit";
    let value = limit_text(bytes, " bytes");
    HostFact::checked("locked memory", value, is_good, (HostState::Limited, remedy))
}

fn free_memory() -> HostFact {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let Some(bytes) = available_memory(&text) else {
        return HostFact::good("free memory", "unknown");
    };
    let value = format!("{} MiB", bytes >> 20);
    let remedy = "end other programs, or limit copies with --queue-size and --connections";
    HostFact::checked("free memory", value, bytes >= MEMORY_MIN, (HostState::Wrong, remedy))
}

/// Bytes of the line MemAvailable of /proc/meminfo.
fn available_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn temporary_folder() -> HostFact {
    let folder = std::env::temp_dir();
    let may_write = rustix::fs::access(&folder, Access::WRITE_OK | Access::EXEC_OK).is_ok();
    let value = folder.display().to_string();
    let remedy =
        "sockets of [ CMD ] are there: make it writable, or set TMPDIR to another directory";
    HostFact::checked("temporary directory", value, may_write, (HostState::Wrong, remedy))
}

fn program(name: &'static str, remedy: &str) -> HostFact {
    found(name, in_path(name), remedy)
}

fn library(name: &'static str, file: &str, remedy: &str) -> HostFact {
    let begins = |folder: &&str| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.find(|entry| entry.starts_with(file)).map(|entry| Path::new(folder).join(entry))
    };
    found(name, LIBRARY_FOLDERS.iter().find_map(begins), remedy)
}

fn found(name: &'static str, path: Option<PathBuf>, remedy: &str) -> HostFact {
    let value =
        path.as_ref().map_or_else(|| "absent".to_string(), |path| path.display().to_string());
    HostFact::checked(name, value, path.is_some(), (HostState::Limited, remedy))
}

/// The program of this name in PATH.
fn in_path(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    let mut places = std::env::split_paths(&folders).map(|folder| folder.join(name));
    places.find(|path| path.is_file() && rustix::fs::access(path, Access::EXEC_OK).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fact_that_is_not_right_has_a_remedy() {
        let facts = host_facts();
        assert!(facts.len() >= 12, "{facts:?}");
        for fact in &facts {
            assert_eq!(fact.state == HostState::Good, fact.remedy.is_none(), "{fact:?}");
            assert!(!fact.value.is_empty(), "{fact:?}");
        }
        assert!(in_path("sh").is_some() && in_path("no such program").is_none());
    }

    #[test]
    fn memory_is_read() {
        assert_eq!(available_memory("MemTotal: 5 kB\nMemAvailable:   2048 kB\n"), Some(2 << 20));
        for text in
            ["", "MemAvailable: x kB", "MemAvailable: 5", "MemAvailable: 18446744073709551615 kB"]
        {
            assert_eq!(available_memory(text), None, "{text}");
        }
    }
}
