//! Disks that a command makes when a client requests them: shared by `tmpdisk:` and `ondemand:`.

use std::ffi::OsString;
use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use blockhaul_block::{
    Access, Can, Device, Error, Facts, FileRange, Flags, Kind, Op, Pending, Reply, Request, Result,
};
use blockhaul_catalog::{Intent, Param, ParamKind, Target};

use blockhaul_backends::support::split;

/// Directories of programs that make file systems, in case the search path lacks them.
const SYSTEM: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

pub(crate) const SIZE: Param = Param {
    name: "size",
    kind: ParamKind::Size,
    default: None,
    doc: "Size of a disk; also passed to command=.",
};
pub(crate) const TYPE: Param = Param {
    name: "type",
    kind: ParamKind::Text,
    default: Some("ext4"),
    doc: "Type of the file system, as for mkfs -t.",
};
pub(crate) const LABEL: Param =
    Param { name: "label", kind: ParamKind::Text, default: None, doc: "Label of the file system." };
pub(crate) const COMMAND: Param = Param {
    name: "command",
    kind: ParamKind::Text,
    default: None,
    doc: "Shell command (/bin/sh) that creates the disk, instead of mkfs. It gets the variables $disk \
          (path of the disk to create), $size, $type, $label, and all other options.",
};

/// How disks are made.
#[derive(Debug)]
pub(crate) struct Maker {
    size: u64,
    kind: String,
    label: Option<String>,
    command: Option<String>,
    variables: Vec<(String, String)>,
}

impl Maker {
    /// The settings in a description.
    pub fn of(target: &Target, size: u64) -> Result<Maker> {
        let args = &target.args;
        let text = |name| args.text(name).map(String::from);
        for (name, _) in args.others() {
            let mut bytes = name.bytes();
            let named = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
                && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            let scheme = &target.scheme;
            if !named || name == "disk" {
                let text = format!("{scheme}: {name:?} cannot be the name of a variable");
                return Err(Error::new(Kind::Usage, text));
            }
            if args.text("command").is_none() {
                let text =
                    format!("{scheme}: unknown option {name:?}: other options require command=");
                return Err(Error::new(Kind::Usage, text));
            }
        }
        Ok(Maker {
            size,
            kind: text("type").unwrap_or_else(|| "ext4".into()),
            label: text("label").filter(|label| !label.is_empty()),
            command: text("command"),
            variables: args.others().to_vec(),
        })
    }

    /// Makes a disk at an absolute path that does not exist; blocks.
    pub fn make(&self, disk: &Path) -> Result<()> {
        let mut command = match &self.command {
            Some(script) => {
                let mut command = Command::new("/bin/sh");
                command.arg("-c").arg(script);
                command
            }
            None => self.mkfs(disk)?,
        };
        command.env("type", &self.kind).env("label", self.label.as_deref().unwrap_or_default());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.env("disk", disk).env("size", self.size.to_string()).stdout(Stdio::null());
        match &self.command {
            Some(_) => run(&mut command, "the command"),
            None => run(&mut command, &format!("mkfs -t {}", self.kind)),
        }
    }

    fn mkfs(&self, disk: &Path) -> Result<Command> {
        let made = File::create_new(disk).and_then(|file| file.set_len(self.size));
        made.map_err(|error| {
            Error::system(format!("cannot create a disk of {} bytes", self.size), error)
        })?;
        let kind = self.kind.as_str();
        let mut command = Command::new("mkfs");
        command.args(["-t", kind]);
        let is_fat = kind.ends_with("fat") || kind == "msdos";
        // Options to accept whole disks, and files, without asking.
        let options: &[&str] = match kind {
            "xfs" | "btrfs" | "f2fs" => &["-f"],
            "ntfs" => &["-Q", "-F"],
            _ if kind.starts_with("ext") => &["-F"],
            _ if is_fat => &["-I"],
            _ => &[],
        };
        command.args(options);
        let label = match kind {
            "f2fs" => "-l",
            _ if is_fat => "-n",
            _ => "-L",
        };
        if let Some(text) = &self.label {
            command.arg(label).arg(text);
        }
        command.arg(disk);
        Ok(command)
    }
}

/// Runs a command that makes a disk, named `what` in messages; blocks.
pub(crate) fn run(command: &mut Command, what: &str) -> Result<()> {
    // Standard input and output may belong to a client.
    let status = command.env("PATH", search_path()).stdin(Stdio::null()).status();
    let status = status.map_err(|error| {
        Error::system(format!("cannot create a disk: cannot run {what}"), error)
    })?;
    if status.success() {
        Ok(())
    } else {
        let text = format!("cannot create a disk: {what} failed: {status}");
        Err(Error::new(Kind::Io, text))
    }
}

/// Whether a program of this name, or at this path, exists.
pub(crate) fn have(program: &str) -> bool {
    std::env::split_paths(&search_path()).any(|folder| folder.join(program).is_file())
}

fn search_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    for folder in SYSTEM {
        path.push(":");
        path.push(folder);
    }
    path
}

/// A directory accessible only to this user: others must not replace the disk before it is opened.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// A new one in `$TMPDIR`, or in /var/tmp; removed with its contents on drop.
    pub fn new() -> Result<Folder> {
        let place = std::env::var_os("TMPDIR").filter(|place| !place.is_empty());
        let place = place.map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        let cannot = |error| {
            Error::system(
                format!("cannot create a directory for a disk in {}", place.display()),
                error,
            )
        };
        loop {
            let mut random = [0; 8];
            let flags = rustix::rand::GetRandomFlags::empty();
            rustix::rand::getrandom(&mut random, flags).map_err(|error| cannot(error.into()))?;
            let name = format!("blockhaul-disk-{:016x}", u64::from_ne_bytes(random));
            let path = std::path::absolute(place.join(name)).map_err(cannot)?;
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Folder(path)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(cannot(error)),
            }
        }
    }

    /// The path for a new disk.
    pub fn disk(&self) -> PathBuf {
        self.0.join("disk")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(folder: &Path) {
    if let Err(error) = std::fs::remove_dir_all(folder) {
        log::warn!("cannot remove {}: {error}", folder.display());
    }
}

/// A disk that was made, for one client. One that is removed with its client need not reach
/// storage; another one may be locked, for as long as the file of the lock is open.
pub(crate) async fn device(
    path: &Path,
    write: bool,
    temporary: bool,
    lock: Option<File>,
) -> Result<Arc<dyn Device>> {
    let name = path.to_str();
    let name =
        name.ok_or_else(|| Error::new(Kind::Usage, "the name of the directory is not UTF-8"))?;
    let intent = Intent { write, ..Intent::READ };
    let inner = split::file(name, intent).await?;
    let mut facts = Facts::clone(&inner.facts());
    // Another connection has another disk, or none.
    facts.can -= Can::MULTI_CONN;
    Ok(Arc::new(Made { facts: Arc::new(facts), inner, temporary, _lock: lock }))
}

struct Made {
    facts: Arc<Facts>,
    inner: Arc<dyn Device>,
    temporary: bool,
    _lock: Option<File>,
}

impl Device for Made {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, mut request: Request) -> Pending {
        if self.temporary {
            if matches!(request.op, Op::Flush) {
                return Pending::ready(Ok(Reply::Done));
            }
            request.flags -= Flags::FUA;
        }
        self.inner.submit(request)
    }

    fn file_at(&self, at: u64, len: u64, access: Access) -> Option<FileRange> {
        self.inner.file_at(at, len, access)
    }
}
