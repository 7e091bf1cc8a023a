//! `dir:PATH`, `dir:?dirfd=N`: every regular file of a directory is an export of its name.
//!
//! A file is opened when a client requests it, and closed when its last client has disconnected.
//! Names are one component: nothing outside the directory can be named, and links are not followed
//! unless `links=on` trusts their creators.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

use blockhaul_block::{Device, Error, FileId, Kind, Result, emulate};
use blockhaul_catalog::{
    Backend, BackendTarget, CompositeStorage, Export, ExportClient, Exports, ListedExport,
    OpenFuture, OpenedDevice, Param, ParamKind, Visit, format_size,
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, statat};
use rustix::io::fcntl_dupfd_cloexec;

use super::handed::{DIRFD, InheritedFd};
use super::{DIRECT, LOCK, open};

/// Maximum length of a file name (NAME_MAX).
const NAME_MAX: usize = 255;
/// Maximum number of directory entries read for a list, which must be made in a short time.
const ENTRIES_MAX: usize = 100_000;

const LINKS: Param = Param {
    name: "links",
    kind: ParamKind::Switch,
    default: Some("off"),
    doc: "Follow symbolic links wherever they lead, and also serve block devices. Use it only if everyone \
          who can create links in the directory may read and write the files that they lead to.",
};

/// The backend `dir:PATH`.
pub struct DirBackend;

impl Backend for DirBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["dir"]
    }

    fn operand(&self) -> &'static str {
        "PATH"
    }

    fn summary(&self) -> &'static str {
        "for serve and mount: each regular file of a directory, as an export of its name; opened when a \
         client asks for it (mount: at once), read-only if it cannot be written; symbolic links are not \
         followed"
    }

    fn example(&self) -> &'static str {
        r#"
mkdir disks && blockhaul copy sample:16M disks/a.raw
blockhaul serve dir:disks --uri-export a.raw --run 'blockhaul info "$uri"'
mkdir mnt && blockhaul mount dir:disks mnt --run 'ls mnt'
"#
    }

    fn params(&self) -> &'static [Param] {
        &[
            Param {
                name: "default",
                kind: ParamKind::Text,
                default: None,
                doc: "The file for clients that ask for the empty name. If not given, they are refused.",
            },
            LINKS,
            DIRECT,
            LOCK,
            DIRFD,
        ]
    }

    fn open(&self, _target: BackendTarget) -> OpenFuture<OpenedDevice> {
        let text = "dir: holds several devices: name one file, or use it with serve or mount";
        Box::pin(std::future::ready(Err(Error::new(Kind::Usage, text))))
    }

    fn exports(&self, target: &BackendTarget) -> Option<OpenFuture<Arc<dyn Exports>>> {
        let target = target.clone();
        Some(Box::pin(async move {
            let folder = offload(move || ExportFolder::open(target)).await?;
            Ok(Arc::new(DirExports(Arc::new(folder))) as Arc<dyn Exports>)
        }))
    }
}

struct ExportFolder {
    fd: OwnedFd,
    target: BackendTarget,
    /// Its names: two of one file are two owners of it.
    names: CompositeStorage,
    /// Open devices, by name, device and inode.
    open: Mutex<HashMap<(String, FileId), Weak<dyn Device>>>,
}

impl ExportFolder {
    fn open(target: BackendTarget) -> Result<ExportFolder> {
        let path = target.path();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = match InheritedFd::find(&target, DIRFD.name)? {
            Some(handed) => folder_of(&handed)?,
            None if path.as_os_str().is_empty() => {
                let text =
                    "dir: has no path: write dir:PATH, or dir:?dirfd=N for an open directory";
                return Err(Error::new(Kind::Usage, text));
            }
            None => rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| {
                let text = format!("cannot open the directory {}", path.display());
                Error::system(text, errno.into())
            })?,
        };
        let folder =
            ExportFolder { fd, target, names: CompositeStorage::default(), open: Mutex::default() };
        if let Some(name) = folder.target.args.text("default") {
            check(name)?;
        }
        Ok(folder)
    }

    /// The regular files, by name.
    fn list(&self) -> Result<Vec<ListedExport>> {
        let cannot =
            |errno: rustix::io::Errno| Error::system("cannot read the directory", errno.into());
        let mut listed = Vec::new();
        let mut seen = 0;
        for entry in rustix::fs::Dir::read_from(&self.fd).map_err(cannot)? {
            let entry = entry.map_err(cannot)?;
            seen += 1;
            if seen > ENTRIES_MAX {
                log::warn!("only {ENTRIES_MAX} entries of the directory are listed");
                break;
            }
            // A name that is not valid text cannot be an export name.
            let Ok(name) = entry.file_name().to_str() else { continue };
            let links = self.target.args.switch(LINKS.name);
            let plain = matches!(entry.file_type(), FileType::RegularFile | FileType::Unknown);
            if !plain && !links {
                continue;
            }
            let flags = if links { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
            // It may be gone by now.
            let Ok(stat) = statat(&self.fd, name, flags) else { continue };
            let description = match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => {
                    let size = u64::try_from(stat.st_size).unwrap_or(0);
                    format!("file of {} ({size} bytes)", approximately(size))
                }
                FileType::BlockDevice if links => "block device".to_string(),
                _ => continue,
            };
            listed.push(ListedExport { name: name.to_string(), description });
        }
        listed.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(listed)
    }

    /// The device of a file: the one that other clients already use, if any.
    fn device(&self, name: &str) -> Result<Arc<dyn Device>> {
        let name = match (name, self.target.args.text("default")) {
            ("", Some(default)) => default,
            ("", None) => {
                let text = "this server has an export for each file: ask for one by its name";
                return Err(Error::new(Kind::NotFound, text));
            }
            (name, _) => name,
        };
        check(name)?;
        let links = self.target.args.switch(LINKS.name);
        let context = self.target.context.for_part(&self.names, format!("{name:?}"));
        let mut target = BackendTarget { context, ..self.target.clone() };
        let file = match open::open_in(&self.fd, name, links, &target) {
            Err(error)
                if target.intent.write
                    && matches!(error.kind(), Kind::ReadOnly | Kind::Refused | Kind::InUse) =>
            {
                log::debug!("{name} is served read-only: {error}");
                target.intent.write = false;
                open::open_in(&self.fd, name, links, &target)?
            }
            opened => opened?,
        };
        let identity = (name.to_string(), file.identity()?);
        let mut open = self.open.lock().expect("no panic under this lock");
        open.retain(|_, device| device.strong_count() > 0);
        if let Some(device) = open.get(&identity).and_then(Weak::upgrade) {
            return Ok(device);
        }
        // Once for all clients: the emulation may have state, such as locks on blocks.
        let device = emulate::emulate(Arc::new(file));
        open.insert(identity, Arc::downgrade(&device));
        Ok(device)
    }
}

/// A descriptor of a directory that was passed in: names are looked up in it without reopening it.
fn folder_of(handed: &InheritedFd) -> Result<OwnedFd> {
    let number = handed.number();
    let failed = |errno: rustix::io::Errno| {
        Error::system(format!("cannot use descriptor {number}"), errno.into())
    };
    let stat = fstat(handed.fd()).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        let text = format!("dirfd={number} is not a directory: write file:?fd={number} for a file");
        return Err(Error::new(Kind::Usage, text));
    }
    fcntl_dupfd_cloexec(handed.fd(), 3).map_err(failed)
}

/// Refuses names that are not of a file in the directory itself.
fn check(name: &str) -> Result<()> {
    let wrong = name.is_empty()
        || name.len() > NAME_MAX
        || name == "."
        || name == ".."
        || name.contains(['/', '\0']);
    if wrong {
        Err(Error::new(Kind::NotFound, "is not the name of a file in this directory"))
    } else {
        Ok(())
    }
}

/// A size for users.
fn approximately(size: u64) -> String {
    let unit = size.checked_ilog2().unwrap_or(0) / 10 * 10;
    // Whole units, in the form in which they are typed.
    format_size(size >> unit << unit)
}

struct DirExports(Arc<ExportFolder>);

impl Exports for DirExports {
    fn admit(&self, _client: ExportClient) -> OpenFuture<Arc<dyn Visit>> {
        let visit = DirVisit(self.0.clone());
        Box::pin(std::future::ready(Ok(Arc::new(visit) as Arc<dyn Visit>)))
    }
}

struct DirVisit(Arc<ExportFolder>);

impl Visit for DirVisit {
    fn list(&self, _tls: bool) -> OpenFuture<Vec<ListedExport>> {
        let folder = self.0.clone();
        Box::pin(offload(move || folder.list()))
    }

    fn open(&self, name: &str, _tls: bool) -> OpenFuture<Option<Export>> {
        let folder = self.0.clone();
        let name = name.to_string();
        Box::pin(offload(move || Ok(Some(Export::own(&name, folder.device(&name)?)))))
    }
}

/// Runs an operation that may wait for a disk or a network: not on the worker.
async fn offload<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    blockhaul_io::offload(work)
        .await
        .map_err(|lost| Error::new(Kind::Io, "opening the file was cancelled").because(lost))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockhaul_catalog::{DeviceSpec, Intent, Registry};
    use std::os::unix::fs::symlink;

    fn with_folder<T: Send + 'static>(
        options: &'static str,
        check: impl AsyncFnOnce(Arc<dyn Visit>, &std::path::Path) -> T + Send + 'static,
    ) -> T {
        let runtime = blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig {
            workers: 1,
            ..blockhaul_io::RuntimeConfig::default()
        })
        .unwrap();
        let dir = tempfile::tempdir().unwrap();
        runtime.block_on(move || async move {
            let inside = dir.path().join("images");
            std::fs::create_dir(&inside).unwrap();
            std::fs::write(inside.join("b.raw"), vec![1; 5 << 20]).unwrap();
            std::fs::write(inside.join("a"), "abc").unwrap();
            std::fs::write(dir.path().join("secret"), "secret").unwrap();
            std::fs::create_dir(inside.join("folder")).unwrap();
            std::fs::write(inside.join("folder/deep"), "deep").unwrap();
            symlink("../secret", inside.join("out")).unwrap();
            symlink("a", inside.join("in")).unwrap();
            let pipe = FileType::Fifo;
            rustix::fs::mknodat(
                rustix::fs::CWD,
                inside.join("pipe"),
                pipe,
                Mode::from_raw_mode(0o600),
                0,
            )
            .unwrap();
            let registry = Registry {
                backends: crate::all(),
                path: crate::PATH_SCHEME,
                ..Registry::default()
            };
            let spec = format!("dir:{}{options}", inside.display());
            let spec = DeviceSpec::parse(spec.as_ref()).unwrap();
            let exports = registry.exports(&spec, &[], Intent::WRITE).await.unwrap().unwrap();
            let visit = exports.admit(ExportClient::default()).await.unwrap();
            check(visit, &inside).await
        })
    }

    #[test]
    fn only_its_own_regular_files_are_listed_and_opened() {
        with_folder("", async |visit, _| {
            let listed = visit.list(false).await.unwrap();
            let names: Vec<_> = listed.iter().map(|one| one.name.as_str()).collect();
            assert_eq!(names, ["a", "b.raw"]);
            assert_eq!(listed[1].description, "file of 5M (5242880 bytes)");
            assert_eq!(visit.open("a", false).await.unwrap().unwrap().device.facts().size, 3);
            let long = "x".repeat(4096);
            let bad = [
                "",
                ".",
                "..",
                "/",
                "a/",
                "./a",
                "../secret",
                "folder",
                "folder/deep",
                "out",
                "in",
                "pipe",
                "a\0",
                "b",
                "..\\a",
                &long,
            ];
            for bad in bad {
                let error = visit.open(bad, false).await.err();
                let kind = error.map(|error| error.kind());
                assert_eq!(kind, Some(Kind::NotFound), "{bad:?}");
            }
        });
    }

    #[test]
    fn clients_of_a_file_share_it_and_new_files_are_new() {
        with_folder("?default=a", async |visit, dir| {
            let one = visit.open("a", false).await.unwrap().unwrap().device;
            let default = visit.open("", false).await.unwrap().unwrap().device;
            let facts = one.facts();
            assert_eq!((facts.size, default.facts().size), (3, 3));
            // After a file is replaced, new clients get the new one.
            std::fs::write(dir.join("new"), "larger").unwrap();
            std::fs::rename(dir.join("new"), dir.join("a")).unwrap();
            assert_eq!(visit.open("a", false).await.unwrap().unwrap().device.facts().size, 6);
            assert_eq!(one.facts().size, 3);
        });
    }
}
