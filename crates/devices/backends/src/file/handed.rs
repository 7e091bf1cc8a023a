//! Open files and directories passed in by number: descriptors that this process was started with.
//!
//! A file is reopened through /proc, so that its offset, its locks and its flags are not shared
//! with the caller, and so that it can be opened for direct I/O. If reopening is not permitted, the
//! descriptor itself is used, provided that it is suitable: programs pass descriptors of files that
//! the other may not open.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{BackendTarget, Param, ParamKind};
use rustix::fs::{Mode, OFlags, fcntl_getfl};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

pub(super) const FD: Param = Param {
    name: "fd",
    kind: ParamKind::Number,
    default: None,
    doc: "Instead of PATH: number of an inherited descriptor, 3 or more, of a file or block device. \
          Read-only if it is only open for reading.",
};

pub(super) const DIRFD: Param = Param {
    name: "dirfd",
    kind: ParamKind::Number,
    default: None,
    doc: "Instead of PATH: number of an inherited descriptor, 3 or more, of a directory.",
};

/// Descriptors taken so far, by number: each can be taken once, but opened for each client. They
/// remain until the process ends, as they cannot be passed in again.
static TAKEN: Mutex<Option<HashMap<i32, Arc<OwnedFd>>>> = Mutex::new(None);

/// An open descriptor that this process was started with.
pub(super) struct InheritedFd {
    number: i32,
    fd: Arc<OwnedFd>,
}

impl InheritedFd {
    /// The descriptor whose number is the option `key`; `None` without it. Refuses an option
    /// together with a path, and descriptors that were not open when the process began: other
    /// numbers are its own files.
    pub(super) fn find(target: &BackendTarget, key: &str) -> Result<Option<InheritedFd>> {
        let Some(typed) = target.args.number(key) else { return Ok(None) };
        if !target.rest.is_empty() {
            let text = format!("has a path and {key}={typed}: leave out one of them");
            return Err(Error::new(Kind::Usage, text));
        }
        if typed <= 2 {
            let text = format!("{key}={typed} is standard input, output or error: use 3 or more");
            return Err(Error::new(Kind::Usage, text));
        }
        let taken = i32::try_from(typed).ok().and_then(|number| Some((number, take(number)?)));
        match taken {
            Some((number, fd)) => Ok(Some(InheritedFd { number, fd })),
            None => {
                let text = format!(
                    "{key}={typed}: there is no such inherited descriptor: in a shell, open it with \
                     {typed}<>FILE or {typed}<FILE after the command"
                );
                Err(Error::new(Kind::NotFound, text))
            }
        }
    }

    /// Its number.
    pub(super) fn number(&self) -> i32 {
        self.number
    }

    /// The descriptor.
    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Whether it is open for reading only.
    pub(super) fn is_readonly(&self) -> bool {
        self.flags() & OFlags::RWMODE == OFlags::RDONLY
    }

    /// The same file, reopened with these flags, or the same open file description if that is not
    /// permitted.
    pub(super) fn open(&self, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        match rustix::fs::open(path(self.number), flags, Mode::empty()) {
            // There may be no /proc.
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::NOENT) if self.serves(flags) => {
                log::debug!("descriptor {} cannot be opened anew: it is shared", self.number);
                fcntl_dupfd_cloexec(&*self.fd, 3)
            }
            opened => opened,
        }
    }

    /// Whether its open file description can be used as if opened with these flags.
    fn serves(&self, wanted: OFlags) -> bool {
        let has = self.flags();
        let mode = has & OFlags::RWMODE;
        // At any offset, O_APPEND would write to the end.
        let strange = OFlags::APPEND | OFlags::DIRECT | OFlags::PATH;
        (mode == OFlags::RDWR || mode == wanted & OFlags::RWMODE)
            && !wanted.contains(OFlags::DIRECT)
            && !has.intersects(strange)
    }

    fn flags(&self) -> OFlags {
        // It is open, so this cannot fail; if it does, assume nothing.
        fcntl_getfl(&*self.fd).unwrap_or(OFlags::PATH)
    }
}

/// The path for reopening and inspecting a descriptor of this process.
pub(super) fn path(number: i32) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{number}"))
}

fn take(number: i32) -> Option<Arc<OwnedFd>> {
    // A panic cannot leave the state under this lock inconsistent.
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    let taken = taken.get_or_insert_default();
    if let Some(fd) = taken.get(&number) {
        return Some(fd.clone());
    }
    let fd = Arc::new(blockhaul_os::inherited(number)?);
    taken.insert(number, fd.clone());
    Some(fd)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::{AsFd, IntoRawFd as _};
    use std::os::unix::fs::OpenOptionsExt as _;

    use blockhaul_block::{Can, Device as _, DeviceExt as _};
    use blockhaul_catalog::{Backend as _, Intent, ParamValues};
    use blockhaul_io::{Data, Runtime, RuntimeConfig};

    use super::super::device::FileDevice;
    use super::super::{FileBackend, open};
    use super::*;

    /// As if this process had been started with it: not close-on-exec, and without an owner.
    fn hand_over(fd: impl AsFd) -> i32 {
        rustix::io::dup(fd).unwrap().into_raw_fd()
    }

    fn target(rest: &str, query: &str, intent: Intent) -> BackendTarget {
        let typed = blockhaul_catalog::parse_options(query).unwrap();
        let args = ParamValues::check("file", FileBackend.params(), &typed).unwrap();
        // The clients of one export.
        let registry = blockhaul_catalog::Registry::default().for_command();
        BackendTarget {
            scheme: "file".into(),
            rest: rest.into(),
            command: Vec::new(),
            args,
            intent,
            context: blockhaul_catalog::OpenContext::new(&registry),
        }
    }

    fn device(number: i32, intent: Intent) -> Result<FileDevice> {
        let (device, resize) = open::open(&target("", &format!("fd={number}"), intent))?;
        resize.map_or(Ok(()), |resize| resize.run())?;
        Ok(device)
    }

    fn run(check: impl AsyncFnOnce() + Send + 'static) {
        let runtime =
            Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
        runtime.block_on(move || check());
    }

    #[test]
    fn a_deleted_file_is_served_by_several_devices_whatever_its_offset_and_flags() {
        run(async || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("disk");
            fs::write(&path, "0123456789").unwrap();
            let mut options = fs::File::options();
            options.read(true).write(true).custom_flags(append());
            let mut file = options.open(&path).unwrap();
            std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(5)).unwrap();
            fs::remove_file(&path).unwrap();
            let number = hand_over(&file);
            let one = device(number, Intent::WRITE).unwrap();
            let two = device(number, Intent::WRITE).unwrap();
            assert_eq!(one.facts().size, 10);
            one.write(2, Data::copy_of(b"ab")).await.unwrap();
            assert_eq!(two.read(0, 10).await.unwrap().bytes(), b"01ab456789");
            drop((one, two));
            // It can be opened again after all clients have disconnected, and be emptied.
            let made = device(number, Intent::target(4096)).unwrap();
            assert_eq!(made.facts().size, 4096);
            assert_eq!(made.read(0, 4).await.unwrap().bytes(), [0; 4]);
            assert_eq!(std::io::Seek::stream_position(&mut file).unwrap(), 5);
        });
    }

    #[test]
    fn what_is_open_for_reading_is_read_only() {
        run(async || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("disk");
            fs::write(&path, "0123").unwrap();
            let number = hand_over(fs::File::open(&path).unwrap());
            let served = device(number, Intent::WRITE).unwrap();
            assert!(!served.facts().can.contains(Can::WRITE));
            let error = device(number, Intent::target(8)).err().unwrap();
            assert_eq!(error.kind(), Kind::ReadOnly);
            assert_eq!(fs::read(&path).unwrap(), b"0123", "it is not emptied");
        });
    }

    #[test]
    fn a_description_stands_in_only_where_nothing_is_in_the_way() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, "0123").unwrap();
        let serves = |write: bool, custom: i32, wanted: OFlags| {
            let mut options = fs::File::options();
            let file = options.read(true).write(write).custom_flags(custom).open(&path).unwrap();
            InheritedFd { number: 3, fd: Arc::new(file.into()) }.serves(wanted)
        };
        let both = OFlags::RDWR | OFlags::CLOEXEC;
        let read = OFlags::RDONLY;
        assert!(serves(true, 0, both));
        assert!(serves(true, 0, read));
        assert!(serves(false, 0, read));
        assert!(!serves(false, 0, both));
        assert!(!serves(true, append(), both));
        assert!(!serves(true, 0, both | OFlags::DIRECT));
    }

    #[test]
    fn what_is_wrong_is_said() {
        run(async || {
            let dir = tempfile::tempdir().unwrap();
            let (pipe, _other) = rustix::pipe::pipe().unwrap();
            let own = fs::File::create(dir.path().join("own")).unwrap();
            let own = std::os::fd::AsRawFd::as_raw_fd(&own);
            let cases = [
                ("", "fd=2".into(), Kind::Usage, "use 3 or more"),
                ("", "fd=999999".into(), Kind::NotFound, "no such inherited descriptor"),
                ("", "fd=99999999999".into(), Kind::NotFound, "no such inherited descriptor"),
                // Other open descriptors must not be accessible to users.
                ("", format!("fd={own}"), Kind::NotFound, "no such inherited descriptor"),
                ("", format!("fd={}", hand_over(&pipe)), Kind::Usage, "is a pipe"),
                (
                    "",
                    format!("fd={}", hand_over(fs::File::open(&dir).unwrap())),
                    Kind::Usage,
                    "dir",
                ),
                ("disk", "fd=3".into(), Kind::Usage, "leave out one of them"),
            ];
            for (rest, query, kind, part) in cases {
                let error = open::open(&target(rest, &query, Intent::READ)).err().unwrap();
                assert!(error.to_string().contains(part), "{query}: {error}");
                assert_eq!(error.kind(), kind, "{query}: {error}");
            }
        });
    }

    #[test]
    fn a_folder_is_used_by_its_descriptor() {
        run(async || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("images");
            let moved = dir.path().join("moved");
            fs::create_dir(&path).unwrap();
            fs::write(path.join("a"), "abc").unwrap();
            let number = hand_over(fs::File::open(&path).unwrap());
            fs::rename(&path, moved).unwrap();
            let registry = blockhaul_catalog::Registry {
                backends: crate::all(),
                ..blockhaul_catalog::Registry::default()
            };
            let folder = async |number: i32| {
                let spec =
                    blockhaul_catalog::DeviceSpec::parse(format!("dir:?dirfd={number}").as_ref())
                        .unwrap();
                registry.exports(&spec, &[], Intent::WRITE).await
            };
            for _ in 0..2 {
                let exports = folder(number).await.unwrap().unwrap();
                let visit = exports.admit(Default::default()).await.unwrap();
                assert_eq!(visit.list(false).await.unwrap().len(), 1);
                assert_eq!(visit.open("a", false).await.unwrap().unwrap().device.facts().size, 3);
            }
            let file = hand_over(fs::File::open(dir.path().join("moved/a")).unwrap());
            let error = folder(file).await.err().unwrap();
            assert!(error.to_string().contains("is not a directory"), "{error}");
        });
    }

    /// O_APPEND for the standard library.
    fn append() -> i32 {
        i32::try_from(OFlags::APPEND.bits()).unwrap()
    }
}
