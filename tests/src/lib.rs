//! Tests of the `blockhaul` program against the real peers: common helpers. Each file of the directory
//! of tests beside this one is a theme.
//!
//! [`blockhaul`] is the program under test, with every unpacked peer in its search path, so that
//! `[ nbdkit … ]` works; [`run`] bounds and captures a run, [`serve`] starts a server.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use blockhaul_testkit::image;
// Here `text` is that of a path.
pub use blockhaul_testkit::tools::text as lossy;
use blockhaul_testkit::tools::{
    self, PeerProgram, PeerServer, ScratchDir, SkipReason, skip_or_fail,
};

pub mod disks;
pub mod exercise;

/// Longer than any command here takes on a slow and busy machine.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The program under test: that of this build, which is built if a source is newer, or the one that
/// `BLOCKHAUL_UNDER_TEST` names.
///
/// # Panics
/// Where it cannot be built.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| match std::env::var_os("BLOCKHAUL_UNDER_TEST") {
        Some(path) => path.into(),
        None => built(),
    })
}

fn built() -> PathBuf {
    let program = profile().join("blockhaul");
    // `blockhaul bench` starts it.
    build_unless_fresh(&[program.clone(), profile().join("blockhaul-bench")]);
    program
}

/// The directory with the program and the module for Python of this build, which are built if a source
/// is newer.
///
/// # Panics
/// Where they cannot be built.
pub fn fresh_module() -> PathBuf {
    let files = ["blockhaul", "blockhaul-bench", "lib_blockhaul.so"];
    build_unless_fresh(&files.map(|file| profile().join(file)));
    profile()
}

/// A test lies in `TARGET/PROFILE/deps`, the program in `TARGET/PROFILE`.
fn profile() -> PathBuf {
    let exe = std::env::current_exe().expect("a test knows its own path");
    exe.ancestors().nth(2).expect("a test lies in target/PROFILE/deps").to_path_buf()
}

/// Builds the programs, unless these files exist and the first and the last are newer than all sources.
fn build_unless_fresh(files: &[PathBuf]) {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(1);
    let workspace = workspace.expect("this package lies in the workspace");
    let newest = newest_source(&workspace.join("crates"));
    let is_fresh = |file: &PathBuf| {
        let modified = fs::metadata(file).and_then(|data| data.modified());
        modified.is_ok_and(|built| built >= newest || file.ends_with("blockhaul-bench"))
    };
    if files.iter().all(is_fresh) {
        return;
    }
    let profile = profile();
    let name = match profile.file_name().and_then(OsStr::to_str) {
        None | Some("debug") => "dev",
        Some(name) => name,
    };
    let target = profile.parent().expect("a profile's directory lies in target");
    // Several test programs may do so at once: Cargo has a lock.
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(workspace).args(["build", "--quiet", "--package", "blockhaul-cli"]);
    cargo.args(["--package", "blockhaul-bench"]);
    if files.iter().any(|file| file.ends_with("lib_blockhaul.so")) {
        cargo.args(["--package", "blockhaul-python-module"]);
    }
    cargo.args(["--profile", name, "--target-dir"]).arg(target);
    let output = tools::output(&mut cargo, Duration::from_secs(1800));
    let output = output.unwrap_or_else(|why| panic!("{why}"));
    assert!(output.status.success(), "cannot build blockhaul: {}", lossy(&output.stderr));
}

/// Whether a file is compiled into the program: the host for plugins in Python is, too.
fn is_source(path: &Path) -> bool {
    let hosted = path.parent().is_some_and(|folder| folder.ends_with("python/host"));
    let extension = path.extension().and_then(OsStr::to_str);
    path.ends_with("Cargo.toml") || extension == Some("rs") || (hosted && extension == Some("py"))
}

/// When the newest source of the program was changed.
fn newest_source(folder: &Path) -> SystemTime {
    let mut newest = SystemTime::UNIX_EPOCH;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let found = match entry.file_type() {
            Ok(kind) if kind.is_dir() && name != "testkit" && name != "tests" => {
                newest_source(&path)
            }
            Ok(_) if is_source(&path) => {
                entry.metadata().and_then(|data| data.modified()).unwrap_or(newest)
            }
            _ => newest,
        };
        newest = newest.max(found);
    }
    newest
}

/// A command that runs the program under test, with the unpacked peers in its search path.
pub fn blockhaul(args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(args);
    // All peers lie in one directory.
    let peers = PeerProgram::find("nbdkit").ok();
    if let Some(dir) = peers.as_ref().and_then(|peer| peer.program().parent()) {
        let mut path = dir.as_os_str().to_owned();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        command.env("PATH", path);
    }
    command
}

/// Runs the program under test to its end, at most [`LIMIT`].
///
/// # Panics
/// Where it does not end.
#[track_caller]
pub fn run(args: &[&str]) -> Output {
    bounded(&mut blockhaul(args), LIMIT)
}

/// Runs the program under test, which has to succeed; gives what it printed.
///
/// # Panics
/// Where it fails or does not end.
#[track_caller]
pub fn succeed(args: &[&str]) -> String {
    done(&mut blockhaul(args))
}

/// Runs a command to its end, at most [`LIMIT`]; it has to succeed. Gives what it printed.
///
/// # Panics
/// Where it fails or does not end.
#[track_caller]
pub fn done(command: &mut Command) -> String {
    let output = bounded(command, LIMIT);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        lossy(&output.stdout),
        lossy(&output.stderr)
    );
    lossy(&output.stdout)
}

/// Runs a peer, which has to succeed; gives what it printed.
///
/// # Panics
/// Where it fails or does not end.
#[track_caller]
pub fn peer(peer: &PeerProgram, args: &[&str]) -> String {
    done(peer.command().args(args))
}

/// Runs a command to its end.
///
/// # Panics
/// Where it has not ended within the limit.
#[track_caller]
pub fn bounded(command: &mut Command, limit: Duration) -> Output {
    match tools::output(command, limit) {
        Ok(output) => output,
        Err(why) => panic!("{command:?}: {why}"),
    }
}

/// Starts `blockhaul serve` on a socket of that name in the scratch directory. It ends when the thread
/// that started it ends.
///
/// # Panics
/// Where it does not start.
#[track_caller]
pub fn serve(scratch: &ScratchDir, name: &str, args: &[&str]) -> PeerServer {
    PeerServer::blockhaul(program(), &scratch.socket(name), args)
        .unwrap_or_else(|why| panic!("{why}"))
}

/// Starts a program that listens on a TCP port of this machine, passed to it: one that was free a
/// moment ago. Returns what was started, and the port.
///
/// # Panics
/// Where it fails with each of several ports; others may take one of them in between.
#[track_caller]
pub fn with_port<T>(mut start: impl FnMut(u16) -> Result<T, String>) -> (T, u16) {
    let mut failed = Vec::new();
    for _ in 0..5 {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let port = free.expect("this machine has a free port").port();
        match start(port) {
            Ok(started) => return (started, port),
            Err(why) => failed.push(why),
        }
    }
    panic!("{failed:?}")
}

/// Compiles a plugin; `None` (and the reason on standard error) where there is no compiler or no header
/// of nbdkit's. `source` is below the workspace.
///
/// # Panics
/// Where it cannot be compiled.
pub fn compile(source: &Path, define: &str, scratch: &ScratchDir) -> Option<PathBuf> {
    compile_with(source, define, scratch, &[])
}

/// The same, with more arguments for the compiler, behind the others.
///
/// # Panics
/// Where it cannot be compiled.
pub fn compile_with(
    source: &Path,
    define: &str,
    scratch: &ScratchDir,
    more: &[&OsStr],
) -> Option<PathBuf> {
    let nbdkit = PeerProgram::require("nbdkit")?;
    let there = nbdkit.program().parent()?.parent()?.join("root/usr/include");
    if !there.join("nbdkit-plugin.h").is_file() {
        skip_or_fail(&SkipReason::new("the peers have no nbdkit-plugin.h"));
        return None;
    }
    // Those alone: beside them are those of the peers' C library, which is not this machine's.
    let headers = scratch.file("include");
    fs::create_dir_all(&headers).expect("a scratch directory can be written");
    for entry in fs::read_dir(&there).expect("the peers' headers can be read").flatten() {
        let to = headers.join(entry.file_name());
        if entry.file_name().as_encoded_bytes().starts_with(b"nbdkit-") && !to.exists() {
            std::os::unix::fs::symlink(entry.path(), to)
                .expect("a scratch directory can be written");
        }
    }
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
    let out = scratch.file(&format!("{define}{}.so", text(Path::new(source.file_stem()?))));
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
    cc.args(["-Wno-unused-parameter", "-Wno-missing-field-initializers", "-I"]);
    cc.arg(&headers).arg("-I").arg(workspace.join("crates/devices/cabi/include"));
    cc.arg(format!("-D{define}")).arg(workspace.join(source)).args(more).arg("-o").arg(&out);
    done(&mut cc);
    Some(out)
}

/// Resident memory of a living process, in bytes.
///
/// # Panics
/// Where there is no such process.
#[track_caller]
pub fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process lives");
    blockhaul_testkit::tools::status_kib(&status, "VmRSS").expect("it has memory") << 10
}

/// A path as an argument. Those of scratch directories are UTF-8.
///
/// # Panics
/// Where it is not.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("the path is UTF-8")
}

/// Bytes that show where they are from: no two words of eight are the same, and only the first is zero.
/// `len` is a multiple of eight.
pub fn distinct(len: u64) -> Vec<u8> {
    (0..len / 8).flat_map(|word| (word * 0x9e37_79b9).to_be_bytes()).collect()
}

/// Makes a file full of bytes that no image of these tests has at the same place in a run.
///
/// # Errors
/// When it cannot be written.
pub fn garbage(path: &Path, size: u64) -> io::Result<()> {
    let file = File::create(path)?;
    let bytes = vec![0xA5; 1 << 20];
    let mut at = 0;
    while at < size {
        let len = (size - at).min(bytes.len() as u64) as usize;
        file.write_all_at(&bytes[..len], at)?;
        at += len as u64;
    }
    Ok(())
}

/// Bytes in those blocks of `grain` bytes of a file that are not all zero: what a sparse copy has to
/// store.
///
/// # Errors
/// When it cannot be read.
pub fn nonzero(path: &Path, grain: u64) -> io::Result<u64> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let zeroes = vec![0; grain as usize];
    let mut bytes = zeroes.clone();
    let mut sum = 0;
    let mut done = 0;
    for range in image::data_ranges(path)? {
        let mut at = done.max(range.start / grain * grain);
        while at < range.end {
            let len = grain.min(size - at);
            let block = &mut bytes[..len as usize];
            file.read_exact_at(block, at)?;
            if *block != zeroes[..len as usize] {
                sum += grain;
            }
            at += grain;
        }
        done = at;
    }
    Ok(sum)
}

/// Bytes in those blocks of `grain` bytes of a file that are not wholly holes.
///
/// # Errors
/// When it cannot be read.
pub fn allocated(path: &Path, grain: u64) -> io::Result<u64> {
    let mut sum = 0;
    let mut done = 0;
    for range in image::data_ranges(path)? {
        let start = done.max(range.start / grain * grain);
        let end = range.end.next_multiple_of(grain);
        sum += end.saturating_sub(start);
        done = done.max(end);
    }
    Ok(sum)
}

/// Asserts that two files hold the same bytes.
///
/// # Panics
/// Where they differ; `what` names what was done.
#[track_caller]
pub fn assert_same(one: &Path, two: &Path, what: &str) {
    if let Err(difference) = image::compare(one, two) {
        panic!("{what}: {} and {}: {difference}", one.display(), two.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_with_something_in_them_count() {
        let scratch = ScratchDir::new().unwrap();
        let path = scratch.file("x");
        let file = File::create(&path).unwrap();
        file.set_len(100_001).unwrap();
        file.write_all_at(&[0; 10_000], 0).unwrap();
        file.write_all_at(&[1], 5000).unwrap();
        file.write_all_at(&[1], 100_000).unwrap();
        assert_eq!(nonzero(&path, 4096).unwrap(), 8192);
        assert_eq!(nonzero(&path, 65536).unwrap(), 131_072);
        assert_eq!(allocated(&path, 4096).unwrap(), 4096 * 4);
        assert_eq!(allocated(&path, 65536).unwrap(), 131_072);
        garbage(&path, 3 << 20).unwrap();
        assert_eq!(nonzero(&path, 4096).unwrap(), 3 << 20);
    }
}
