//! What the results were measured on, without telling whose machine it is: no names, no addresses.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The machine and its state.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MachineFacts {
    /// A short name for folders, such as `2core-xeon`, or what `--label` says.
    pub label: String,
    /// The processor's name from the kernel.
    pub cpu: String,
    /// Processors that this program may use.
    pub cores: usize,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Operating system, its kernel and the kernel's release.
    pub kernel: String,
    /// Processor architecture.
    pub architecture: String,
    /// File system of the scratch directory.
    pub scratch_file_system: Option<String>,
    /// File system of the disk directory.
    pub disk_file_system: Option<String>,
    /// Processes that wanted to run in the minute before the first run.
    pub load_before: f64,
}

impl MachineFacts {
    /// This machine. `label` replaces the derived one.
    pub fn examine(label: Option<&str>, scratch: &Path, disk: &Path) -> MachineFacts {
        let cpu = cpu_name();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        MachineFacts {
            label: label.map_or_else(|| derived_label(cores, &cpu), str::to_owned),
            cores,
            memory_bytes: memory_bytes(),
            kernel: format!(
                "{} {}",
                read_line("/proc/sys/kernel/ostype"),
                read_line("/proc/sys/kernel/osrelease")
            ),
            architecture: std::env::consts::ARCH.to_owned(),
            scratch_file_system: file_system(scratch),
            disk_file_system: file_system(disk),
            load_before: load(),
            cpu,
        }
    }
}

/// Type of the file system that a path is on, as `/proc/self/mountinfo` names it.
pub fn file_system(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    // Later mounts hide earlier ones on the same place.
    let mut best: Option<(usize, &str)> = None;
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let Some(point) = left.split(' ').nth(4) else { continue };
        let point = point.replace("\\040", " ");
        let length = point.len();
        if path.starts_with(&point) && best.is_none_or(|(known, _)| length >= known) {
            best = right.split(' ').next().map(|kind| (length, kind));
        }
    }
    best.map(|(_, kind)| kind.to_owned())
}

/// Bytes that may be used where a path is.
pub fn free_bytes(path: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(path).ok()?;
    found.f_bavail.checked_mul(found.f_frsize)
}

/// Commit of the git tree that a folder is in, with a + if files were changed since. Where there is
/// no git program, as among the peers, the tree's own files tell the commit, with a ? for changes.
pub fn git_commit(dir: &Path) -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").arg("-C").arg(dir).args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    match git(&["rev-parse", "HEAD"]).filter(|commit| !commit.is_empty()) {
        Some(commit) => {
            let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
            Some(if changed.is_empty() { commit } else { commit + "+" })
        }
        None => head(&dir.ancestors().find_map(|dir| {
            let dir = dir.join(".git");
            dir.is_dir().then_some(dir)
        })?),
    }
}

/// The commit of HEAD in a git directory.
fn head(git: &Path) -> Option<String> {
    let head = fs::read_to_string(git.join("HEAD")).ok()?;
    let commit = match head.trim().strip_prefix("ref: ") {
        None => head.trim().to_owned(),
        Some(branch) => match fs::read_to_string(git.join(branch)) {
            Ok(commit) => commit.trim().to_owned(),
            Err(_) => {
                let packed = fs::read_to_string(git.join("packed-refs")).ok()?;
                let line = packed.lines().find(|line| line.split(' ').nth(1) == Some(branch))?;
                line.split(' ').next()?.to_owned()
            }
        },
    };
    let good = commit.len() >= 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
    good.then(|| commit + "?")
}

/// Processes that wanted to run in the last minute.
pub fn load() -> f64 {
    let text = read_line("/proc/loadavg");
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

fn read_line(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn memory_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    // x86 has a model name; Arm machines tell implementer and part only.
    let value = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    value("model name")
        .or_else(|| {
            let implementer = value("CPU implementer")?;
            let part = value("CPU part")?;
            Some(format!("{} implementer {implementer} part {part}", std::env::consts::ARCH))
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Number of cores and family of the processor.
fn derived_label(cores: usize, cpu: &str) -> String {
    const FAMILIES: &[&str] =
        &["epyc", "ryzen", "threadripper", "xeon", "atom", "celeron", "pentium", "core"];
    let cpu = cpu.to_ascii_lowercase();
    let family = FAMILIES.iter().find(|family| cpu.contains(*family));
    format!("{cores}core-{}", family.unwrap_or(&std::env::consts::ARCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_tell_cores_and_family_only() {
        assert_eq!(derived_label(2, "AMD EPYC 9R14"), "2core-epyc");
        assert_eq!(derived_label(8, "Intel(R) Xeon(R) Processor"), "8core-xeon");
        assert_eq!(derived_label(4, "odd"), format!("4core-{}", std::env::consts::ARCH));
    }

    #[test]
    fn a_commit_is_found_without_git() {
        let dir = tempfile::tempdir().unwrap();
        let one = "1".repeat(40);
        let two = "2".repeat(40);
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        fs::create_dir_all(dir.path().join("refs/heads")).unwrap();
        assert_eq!(head(dir.path()), None);
        write("HEAD", "ref: refs/heads/main\n");
        write("packed-refs", &format!("# pack-refs\n{one} refs/heads/main\n"));
        assert_eq!(head(dir.path()), Some(format!("{one}?")));
        write("refs/heads/main", &format!("{two}\n"));
        assert_eq!(head(dir.path()), Some(format!("{two}?")));
        write("HEAD", "../../etc/passwd");
        assert_eq!(head(dir.path()), None);
    }

    #[test]
    fn this_machine_is_examined() {
        let machine = MachineFacts::examine(None, Path::new("/proc"), Path::new("/no/such/place"));
        assert!(machine.memory_bytes > 1 << 20 && machine.cores > 0);
        assert_eq!(machine.scratch_file_system.as_deref(), Some("proc"));
        assert_eq!(machine.disk_file_system, None);
        assert!(machine.kernel.starts_with("Linux "));
    }
}
