//! `ondemand:FOLDER`: disks in a directory by name, made when a client first requests one.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{
    Backend, Client, Export, Exports, Listed, Opened, Opening, Param, ParamKind, Target, Visit,
};
use blockhaul_io::FifoLock;
use rustix::fs::{FlockOperation, flock};

use crate::devices::made;
use crate::devices::made::{COMMAND, LABEL, Maker, SIZE, TYPE};

/// Maximum length of a file name (NAME_MAX).
const NAME_MAX: usize = 255;
/// Maximum number of directory entries in a list.
const ENTRIES_MAX: usize = 100_000;
/// The file for clients that request the empty name.
const DEFAULT: &str = "default";
/// Interval of checks while a client waits for another one to disconnect.
const LOOK: Duration = Duration::from_millis(50);

/// The backend `ondemand:FOLDER`.
pub struct Ondemand;

impl Backend for Ondemand {
    fn schemes(&self) -> &'static [&'static str] {
        &["ondemand"]
    }

    fn operand(&self) -> &'static str {
        "DIR"
    }

    fn summary(&self) -> &'static str {
        "for serve: one disk for each export name, created by mkfs in a directory when a client first asks \
         for it; names cannot begin with a dot; the empty name selects the disk default. Each disk serves \
         one client at a time. Only for trusted clients: each name takes disk space"
    }

    fn example(&self) -> &'static str {
        r#"
mkdir disks
blockhaul serve 'ondemand:disks?size=64M' --uri-export alice --run 'blockhaul info "$uri"'
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[
                SIZE,
                TYPE,
                LABEL,
                COMMAND,
                Param {
                    name: "wait",
                    kind: ParamKind::Switch,
                    default: Some("off"),
                    doc: "Let a client wait for a disk that is in use, instead of refusing the client.",
                },
                Param {
                    name: "share",
                    kind: ParamKind::Switch,
                    default: Some("off"),
                    doc: "Let several clients use one disk at once; this corrupts most file systems.",
                },
            ]
        }
    }

    fn takes_others(&self) -> bool {
        true
    }

    fn open(&self, _target: Target) -> Opening<Opened> {
        let text = "ondemand: holds several devices: use it with serve";
        Box::pin(std::future::ready(Err(Error::new(Kind::Usage, text))))
    }

    fn exports(&self, target: &Target) -> Option<Opening<Arc<dyn Exports>>> {
        let disks = Disks::of(target);
        Some(Box::pin(async move {
            let disks = disks?;
            let folder = disks.folder.clone();
            offload(move || list(&folder).map(drop)).await?;
            Ok(Arc::new(OndemandExports(Arc::new(disks))) as Arc<dyn Exports>)
        }))
    }
}

struct Disks {
    folder: PathBuf,
    maker: Arc<Maker>,
    write: bool,
    wait: bool,
    share: bool,
    /// Disks are made one at a time.
    making: Arc<FifoLock>,
}

impl Disks {
    fn of(target: &Target) -> Result<Disks> {
        let wrong = |text: &str| Error::new(Kind::Usage, format!("ondemand: {text}"));
        let path = target.path();
        if path.as_os_str().is_empty() {
            return Err(wrong("has no directory: write ondemand:DIR?size=1G"));
        }
        let size = target.args.size("size");
        let size = size.ok_or_else(|| wrong("has no size: write ondemand:DIR?size=1G"))?;
        // A background server has another working directory.
        let folder = std::fs::canonicalize(&path).map_err(|error| {
            Error::system(format!("cannot open the directory {}", path.display()), error)
        })?;
        Ok(Disks {
            folder,
            maker: Arc::new(Maker::of(target, size)?),
            write: target.intent.write,
            wait: target.args.switch("wait"),
            share: target.args.switch("share"),
            making: Arc::default(),
        })
    }

    async fn device(&self, name: &str) -> Result<Arc<dyn Device>> {
        let name = if name.is_empty() { DEFAULT } else { name };
        if !is_name(name) {
            let text = "is not a name for a disk: no / and no . at the start, at most 255 bytes";
            return Err(Error::new(Kind::NotFound, text));
        }
        let path = self.folder.join(name);
        let turn = self.making.lock().await;
        let disk = path.clone();
        let maker = self.maker.clone();
        let file = offload(move || open_or_make(&disk, &maker)).await?;
        drop(turn);
        let lock = if self.share { None } else { Some(self.lock(file).await?) };
        made::device(&path, self.write, false, lock).await
    }

    /// Locks a disk for as long as the file is open; waits if necessary.
    async fn lock(&self, file: File) -> Result<File> {
        let operation = if self.write {
            FlockOperation::NonBlockingLockExclusive
        } else {
            FlockOperation::NonBlockingLockShared
        };
        loop {
            match flock(&file, operation) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::WOULDBLOCK) if self.wait => blockhaul_io::sleep(LOOK).await,
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let text = "another client uses this disk; try again later";
                    return Err(Error::new(Kind::Invalid, text));
                }
                Err(error) => return Err(Error::system("cannot lock the disk", error.into())),
            }
        }
    }
}

/// Opens the file for its lock; makes the disk first if necessary. Blocks.
fn open_or_make(disk: &Path, maker: &Maker) -> Result<File> {
    let cannot = |error| Error::system(format!("cannot open {}", disk.display()), error);
    match File::open(disk) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        opened => return opened.map_err(cannot),
    }
    if let Err(error) = maker.make(disk) {
        // It is made anew for the next client.
        if let Err(left) = std::fs::remove_file(disk)
            && left.kind() != ErrorKind::NotFound
        {
            log::warn!("cannot remove {}, which is incomplete: {left}", disk.display());
        }
        return Err(error);
    }
    File::open(disk).map_err(cannot)
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= NAME_MAX
        && !name.starts_with('.')
        && !name.contains(['/', '\0'])
}

/// The disks of the directory, the default one first, whether it exists or not.
fn list(folder: &Path) -> Result<Vec<Listed>> {
    let cannot =
        |error| Error::system(format!("cannot read the directory {}", folder.display()), error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(cannot)?.take(ENTRIES_MAX) {
        let name = entry.map_err(cannot)?.file_name();
        if let Some(name) = name.to_str().filter(|name| is_name(name) && *name != DEFAULT) {
            names.push(name.to_string());
        }
    }
    names.sort_unstable();
    names.insert(0, String::new());
    Ok(names.into_iter().map(|name| Listed { name, description: String::new() }).collect())
}

/// Runs an operation that may wait for a disk or a command: not on the worker.
async fn offload<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    blockhaul_io::offload(work)
        .await
        .map_err(|lost| Error::new(Kind::Io, "opening the disk was cancelled").because(lost))?
}

struct OndemandExports(Arc<Disks>);

impl Exports for OndemandExports {
    fn admit(&self, _client: Client) -> Opening<Arc<dyn Visit>> {
        let visit = OndemandVisit(self.0.clone());
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }
}

struct OndemandVisit(Arc<Disks>);

impl Visit for OndemandVisit {
    fn list(&self, _tls: bool) -> Opening<Vec<Listed>> {
        let folder = self.0.folder.clone();
        Box::pin(offload(move || list(&folder)))
    }

    fn open(&self, name: &str, _tls: bool) -> Opening<Option<Export>> {
        let disks = self.0.clone();
        let name = name.to_string();
        Box::pin(async move {
            let device = disks.device(&name).await?;
            let shown = if name.is_empty() { DEFAULT } else { &name };
            Ok(Some(Export::own(shown, device)))
        })
    }
}
