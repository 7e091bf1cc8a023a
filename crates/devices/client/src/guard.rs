//! A small process beside each server, or script, that this program starts. It ends the server when this
//! program is gone, even by SIGKILL, and removes the directory of the server's socket.
//!
//! The guard is a shell script, because it must not depend on which program uses this library. It
//! detects the end of this program by the end of file on its standard input. A death signal
//! (PR_SET_PDEATHSIG) would reach only the server, not the processes that it has started, and is
//! sent already when the thread that started the server ends.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;

use blockhaul_block::{Error, Kind, Result};

/// The program that the word `blockhaul` means, if it is not this one.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Sets the file that `[ blockhaul … ]` starts, for programs that are not blockhaul itself. The first
/// call counts.
pub fn set_program(path: PathBuf) {
    // A later call does not change it.
    let _ = PROGRAM.set(path);
}

/// The first command in the server's shell; `$1` is the directory. It writes its line of
/// proc_pid_stat(5) there, which has the process ID and the start time of the server. Fails if the
/// guard has already removed the directory.
pub(crate) const REGISTER: &str =
    r#"read -r line </proc/$$/stat; echo "$line" >"$1/pid" || exit 1; shift; "#;

/// Time after SIGTERM until processes are killed, in tenths of a second.
const PATIENCE: &str = "100";

/// Waits for the end of standard input. Then it ends the server that is registered in the directory
/// `$1`, its descendants, and the process groups that they lead. A process gets SIGTERM when its
/// parent has ended: a server may still need the processes that it has started. After `$2` tenths
/// of a second all are killed.
const GUARD: &str = r#"
trap '' HUP INT QUIT TERM PIPE
read -r line
folder=$1 left=$2

# Sets state, parent, group and start of the process $1.
look() {
    read -r line 2>/dev/null </proc/$1/stat || return 1
    # The name of the program may hold anything, and ends with the last parenthesis.
    set -f
    set -- ${line##*) }
    set +f
    [ $# -ge 20 ] || return 1
    state=$1 parent=$2 group=$3
    shift 19
    start=$1
}

# Sets found to the server and all that belongs to it.
find_all() {
    found=" $pid " more=1
    while [ "$more" ]; do
        more=
        for one in /proc/[0-9]*; do
            one=${one#/proc/}
            case $found in *" $one "*) continue ;; esac
            look $one || continue
            case $found in *" $parent "* | *" $group "*) found="$found$one " more=1 ;; esac
        done
    done
}

end_all() {
    asked=" "
    while :; do
        alive=" " next=
        for one in $found; do
            look $one && [ $state != Z ] && alive="$alive$one " next="$next $one:$parent"
        done
        [ "$alive" = " " ] && return
        if [ $left -le 0 ]; then
            kill -KILL $alive
            return
        fi
        for one in $next; do
            case $alive in *" ${one#*:} "*) continue ;; esac
            one=${one%:*}
            case $asked in *" $one "*) continue ;; esac
            kill -TERM $one
            asked="$asked$one "
        done
        sleep 0.1 || sleep 1
        left=$((left - 1))
    done
}

end_server() {
    [ -e "$folder/pid" ] || return
    # It may be about to be written.
    read -r line <"$folder/pid" || sleep 0.1 && read -r line <"$folder/pid" || return
    pid=${line%% *}
    set -f
    set -- ${line##*) }
    set +f
    [ $# -ge 20 ] || return
    shift 19
    registered=$1
    # Another process may have the same id by now.
    look $pid && [ "$start" = "$registered" ] || return
    find_all
    end_all
}

end_server
rm -f "$folder/s" "$folder/blockhaul"
tries=50
# A server that was just being started registers in the meantime, or cannot any more.
until [ -e "$folder/pid" ] || rmdir "$folder" || [ $tries -le 0 ]; do
    sleep 0.1 || sleep 1
    tries=$((tries - 1))
done
end_server
rm -f "$folder/pid"
rmdir "$folder"
"#;

/// A directory for the socket of a server, with the guard that ends the server and removes the
/// directory when this program is gone. Dropping it removes the directory and leaves the server
/// running.
#[derive(Debug)]
pub(crate) struct ProcessGuard {
    folder: PathBuf,
    process: Child,
    /// The other end of its standard input.
    alive: Option<ChildStdin>,
}

impl ProcessGuard {
    /// Makes the directory and starts the guard.
    ///
    /// # Errors
    /// If the directory cannot be made, or there is no shell.
    pub(crate) fn start() -> Result<ProcessGuard> {
        let folder = private_folder()?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", GUARD, "sh"]).arg(&folder).arg(PATIENCE);
        // It holds no descriptors that others wait for, and gets no signals from the terminal.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = command.current_dir("/").process_group(0).spawn();
        match started {
            Ok(mut process) => Ok(ProcessGuard { alive: process.stdin.take(), folder, process }),
            Err(error) => {
                remove(&folder);
                Err(Error::system("cannot start /bin/sh", error))
            }
        }
    }

    /// Ends the server and all that it has started now, and waits for that.
    pub(crate) fn end(&mut self) {
        drop(self.alive.take());
        // Fails only if it has been waited for.
        let _ = self.process.wait();
    }

    /// The directory.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The path for the socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.join("s")
    }

    /// This program under its standard name, whatever its file is called: the first word decides
    /// which program it emulates.
    ///
    /// # Errors
    /// If this program or its name cannot be determined.
    pub(crate) fn this_program(&self) -> Result<PathBuf> {
        let cannot = |error| Error::system("cannot find this program itself", error);
        let program = match PROGRAM.get() {
            Some(program) => program.clone(),
            None => std::env::current_exe().map_err(cannot)?,
        };
        if program.file_name() == Some(OsStr::new("blockhaul")) {
            return Ok(program);
        }
        let link = self.folder.join("blockhaul");
        std::os::unix::fs::symlink(program, &link).map_err(cannot)?;
        Ok(link)
    }
}

impl Drop for ProcessGuard {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
        remove(&self.folder);
    }
}

/// Removes a server's directory. Whatever remains is a few names in the temporary directory.
fn remove(folder: &Path) {
    for name in ["s", "pid", "blockhaul"] {
        let _ = std::fs::remove_file(folder.join(name));
    }
    let _ = std::fs::remove_dir(folder);
}

/// A directory accessible only to this user.
fn private_folder() -> Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let base = std::env::temp_dir();
    let cannot = |error: io::Error| {
        Error::system(format!("cannot make a folder in {}", base.display()), error)
    };
    // The guard has another working directory.
    let place = std::path::absolute(&base).map_err(cannot)?;
    for attempt in 0..100_u32 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let salt = now.map_or(0, |now| now.subsec_nanos());
        let folder = place.join(format!("blockhaul-{}-{salt:x}-{attempt}", std::process::id()));
        match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(cannot(error)),
        }
    }
    Err(Error::new(Kind::Io, format!("cannot make a folder in {}", base.display())))
}
