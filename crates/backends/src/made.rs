//! Disks that a command makes when a client asks for them: what `tmpdisk:` and `ondemand:` share.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use block::{
    Access, Can, Device, Error, Facts, FileRange, Flags, Intent, Kind, Op, Param, ParamKind,
    Pending, Reply, Request, Result, Target,
};

use crate::split;

/// Where programs that make file systems are, for those whose search path leaves it out.
const SYSTEM: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

pub(crate) const SIZE: Param = Param {
    name: "size",
    kind: ParamKind::Size,
    default: None,
    doc: "Size of a disk; with command= it is told to that.",
};
pub(crate) const TYPE: Param = Param {
    name: "type",
    kind: ParamKind::Text,
    default: Some("ext4"),
    doc: "Type of the file system, as for mkfs -t.",
};
pub(crate) const LABEL: Param =
    Param { name: "label", kind: ParamKind::Text, default: None, doc: "Its label." };
pub(crate) const COMMAND: Param = Param {
    name: "command",
    kind: ParamKind::Text,
    default: None,
    doc: "For /bin/sh: makes the disk instead of mkfs; it sees $disk, where the disk is to be, $size, \
          $type, $label, and options of other names.",
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
    /// What a description says about it.
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
                    format!("{scheme}: unknown option {name:?}: only command= has use for it");
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

    /// Makes a disk at an absolute path where nothing is; blocks.
    pub fn make(&self, disk: &Path) -> Result<()> {
        let mut command = match &self.command {
            Some(script) => {
                let mut command = Command::new("/bin/sh");
                command.arg("-c").arg(script);
                command
            }
            None => self.mkfs(disk)?,
        };
        command.env("PATH", search_path()).env("type", &self.kind);
        command.env("label", self.label.as_deref().unwrap_or_default());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        // Standard input and output may be those of a client.
        command.env("disk", disk).env("size", self.size.to_string()).stdin(Stdio::null());
        command.stdout(Stdio::null());
        let what = match &self.command {
            Some(_) => "the command".to_string(),
            None => format!("mkfs -t {}", self.kind),
        };
        let status = command.status().map_err(|error| {
            Error::system(format!("cannot make a disk: cannot run {what}"), error)
        })?;
        match status.success() {
            true => Ok(()),
            false => {
                let text = format!("cannot make a disk: {what} failed: {status}");
                Err(Error::new(Kind::Io, text))
            }
        }
    }

    fn mkfs(&self, disk: &Path) -> Result<Command> {
        let made = File::create_new(disk).and_then(|file| file.set_len(self.size));
        made.map_err(|error| {
            Error::system(format!("cannot make a disk of {} bytes", self.size), error)
        })?;
        let kind = self.kind.as_str();
        let mut command = Command::new("mkfs");
        command.args(["-t", kind]);
        let is_fat = kind.ends_with("fat") || kind == "msdos";
        // Whole disks, and files, are taken without asking.
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

fn search_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    for folder in SYSTEM {
        path.push(":");
        path.push(folder);
    }
    path
}

/// A disk that was made, for one client. One that is gone with its client need not reach a disk;
/// another one may be locked, for as long as the file of the lock is open.
pub(crate) async fn device(
    path: &Path,
    write: bool,
    temporary: bool,
    lock: Option<File>,
) -> Result<Arc<dyn Device>> {
    let name = path.to_str();
    let name =
        name.ok_or_else(|| Error::new(Kind::Usage, "the name of the folder is not UTF-8"))?;
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
