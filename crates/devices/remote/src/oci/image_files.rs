//! The files of the layers of an image together: those of a layer hide and remove those of the layers below it.

use std::collections::BTreeMap;
use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_io::File;
use blockhaul_layers::support::temporary_file;
use blockhaul_wire::printable;

use super::digest::ContentDigest;
use super::tar_scan::{LayerMember, LayerMemberKind, MemberSink};

/// Files that may be the disk.
const FILES_MAX: usize = 64;
/// Bytes of all other members of a layer.
const OTHERS_MAX: u64 = 64 << 30;
const SHOWN_MAX: usize = 100;
/// The directory of a disk, and the beginning of the names of removed files (OCI image specification, "Whiteouts").
const DIRECTORY: &[u8] = b"disk";
const REMOVED: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Bytes of a disk in a temporary file.
#[derive(Clone)]
pub(super) struct StoredDisk {
    pub(super) file: Arc<File>,
    pub(super) size: u64,
    /// The layer that it is in.
    pub(super) layer: ContentDigest,
}

impl StoredDisk {
    /// An empty file of `size` bytes.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn new(size: u64, layer: &ContentDigest) -> Result<StoredDisk> {
        let file = temporary_file("oci", None).map_err(|error| error.or_remedy(ROOM))?;
        let failed = |error: rustix::io::Errno| {
            Error::system("cannot make a temporary file as long as the disk", error.into())
                .with_remedy(ROOM)
        };
        rustix::fs::ftruncate(&file, size).map_err(failed)?;
        Ok(StoredDisk { file: Arc::new(file), size, layer: layer.clone() })
    }

    /// Stores bytes; zeroes are left out.
    ///
    /// # Errors
    /// They cannot be written.
    pub(super) fn store(&self, mut at: u64, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(PIECE) {
            if !blockhaul_io::is_zero(piece) {
                let mut rest = piece;
                while !rest.is_empty() {
                    let offset = at + (piece.len() - rest.len()) as u64;
                    let written = rustix::io::pwrite(&self.file, rest, offset);
                    let written = written.map_err(|error| {
                        let error = Error::system(
                            "cannot write the disk to a temporary file",
                            error.into(),
                        );
                        error.with_remedy(ROOM)
                    })?;
                    rest = &rest[written..];
                }
            }
            at += piece.len() as u64;
        }
        Ok(())
    }
}

/// Zeroes of this length are left out of a file.
const PIECE: usize = 64 << 10;
const ROOM: &str = "set TMPDIR to a directory with enough space";

/// What a name in the image is.
#[derive(Clone)]
enum ImageEntry {
    Disk(StoredDisk),
    /// Something that cannot be a disk, and why.
    Other(&'static str),
}

/// The files of an image that may be its disk.
pub(super) struct ImageFiles {
    /// The path of the disk; none: the only file in [`DIRECTORY`].
    wanted: Option<Vec<u8>>,
    lower: BTreeMap<Vec<u8>, ImageEntry>,
}

impl ImageFiles {
    /// With the name of the disk: a path in the image, or a file in [`DIRECTORY`].
    ///
    /// # Errors
    /// [`Kind::Usage`] if it is no name of a file.
    pub(super) fn new(wanted: Option<&str>) -> Result<ImageFiles> {
        let path = wanted.map(|name| {
            let name = if name.contains('/') { name.to_owned() } else { format!("disk/{name}") };
            normal(name.as_bytes()).filter(|path| !path.is_empty()).ok_or_else(|| {
                let error = Error::new(Kind::Usage, format!("disk: {name:?} is no path of a file"));
                error.with_remedy("write disk=NAME for /disk/NAME, or disk=/PATH")
            })
        });
        Ok(ImageFiles { wanted: path.transpose()?, lower: BTreeMap::new() })
    }

    /// Begins the next layer.
    pub(super) fn layer(&mut self, digest: &ContentDigest) -> LayerFiles<'_> {
        let layer = digest.clone();
        LayerFiles { image: self, layer, current: BTreeMap::new(), open: None, at: 0, others: 0 }
    }

    /// The path and the bytes of the disk, once all layers have been read.
    ///
    /// # Errors
    /// There is none, there are several, or it is no file.
    pub(super) fn disk(mut self) -> Result<(String, StoredDisk)> {
        let shown = |path: &[u8]| format!("/{}", printable(path, SHOWN_MAX));
        let listed =
            self.lower.keys().take(5).map(|path| shown(path)).collect::<Vec<_>>().join(", ");
        let count = self.lower.len();
        let (path, entry) = match (self.lower.pop_first(), count, &self.wanted) {
            (Some(found), 1, _) => found,
            (_, _, Some(wanted)) => {
                let text = format!("the image has no file {}", shown(wanted));
                return Err(Error::new(Kind::NotFound, text).with_remedy("check disk="));
            }
            (None, ..) => {
                let text = "the image has no disk: its directory /disk has no file, or is missing";
                return Err(
                    Error::new(Kind::NotFound, text).with_remedy("name the file with disk=/PATH")
                );
            }
            (Some(_), ..) => {
                let text = format!("the image has {count} files that may be the disk ({listed})");
                return Err(
                    Error::new(Kind::Unsupported, text).with_remedy("choose one with disk=NAME")
                );
            }
        };
        match entry {
            ImageEntry::Disk(disk) => Ok((shown(&path), disk)),
            ImageEntry::Other(what) => {
                let text = format!("{} of the image is {what}, not a file", shown(&path));
                Err(Error::new(Kind::Unsupported, text)
                    .with_remedy("push the image with the disk as a file"))
            }
        }
    }

    /// Whether a path may be that of the disk.
    fn is_candidate(&self, path: &[u8]) -> bool {
        match &self.wanted {
            Some(wanted) => path == wanted,
            None => {
                let name = path.strip_prefix(DIRECTORY).and_then(|rest| rest.strip_prefix(b"/"));
                name.is_some_and(|name| !name.is_empty() && !name.contains(&b'/'))
            }
        }
    }

    /// Removes what is below a path in the lower layers, and what is at the path itself.
    fn remove(&mut self, path: &[u8], with_itself: bool) {
        self.lower.retain(|found, _| {
            let is_itself = found == path;
            !(is_itself && with_itself || is_below(found, path))
        });
    }
}

/// The files of a layer, as they are read.
pub(super) struct LayerFiles<'a> {
    image: &'a mut ImageFiles,
    layer: ContentDigest,
    current: BTreeMap<Vec<u8>, ImageEntry>,
    /// The file that is being stored.
    open: Option<StoredDisk>,
    at: u64,
    /// Bytes of other members.
    others: u64,
}

impl LayerFiles<'_> {
    /// Puts the files of the layer over those of the layers below.
    pub(super) fn finish(self) {
        self.image.lower.extend(self.current);
    }

    fn link(&self, link: &[u8]) -> ImageEntry {
        let path = normal(link).unwrap_or_default();
        let found = self.current.get(&path).or_else(|| self.image.lower.get(&path));
        found.cloned().unwrap_or(ImageEntry::Other("a hard link to a file elsewhere"))
    }
}

impl MemberSink for LayerFiles<'_> {
    fn begin(&mut self, member: LayerMember) -> Result<()> {
        self.open = None;
        self.at = 0;
        let path = normal(&member.name).filter(|path| !path.is_empty());
        let Some(path) = path else { return Ok(()) };
        let (folder, name) = split(&path);
        if name == OPAQUE {
            self.image.remove(folder, false);
            return Ok(());
        }
        if let Some(removed) = name.strip_prefix(REMOVED) {
            let path =
                if folder.is_empty() { removed.to_vec() } else { [folder, b"/", removed].concat() };
            self.image.remove(&path, true);
            return Ok(());
        }
        let is_directory = member.kind == LayerMemberKind::Directory;
        if is_directory {
            self.image.lower.remove(&path);
        } else {
            self.image.remove(&path, true);
            self.current.retain(|found, _| !is_below(found, &path));
        }
        if !self.image.is_candidate(&path) {
            return Ok(());
        }
        let entry = match member.kind {
            LayerMemberKind::File => {
                let disk = StoredDisk::new(member.size, &self.layer)?;
                self.open = Some(disk.clone());
                ImageEntry::Disk(disk)
            }
            LayerMemberKind::HardLink => self.link(&member.link),
            LayerMemberKind::Sparse => ImageEntry::Other("stored without its holes (sparse)"),
            LayerMemberKind::SymbolicLink => ImageEntry::Other("a symbolic link"),
            LayerMemberKind::Directory if self.image.wanted.is_none() => return Ok(()),
            LayerMemberKind::Directory => ImageEntry::Other("a directory"),
            LayerMemberKind::Other => ImageEntry::Other("a device"),
        };
        self.current.insert(path, entry);
        if self.current.len() + self.image.lower.len() > FILES_MAX {
            let text = format!("the image has more than {FILES_MAX} files that may be the disk");
            return Err(
                Error::new(Kind::Unsupported, text).with_remedy("choose one with disk=NAME")
            );
        }
        Ok(())
    }

    fn data(&mut self, bytes: &[u8]) -> Result<()> {
        if let Some(disk) = &self.open {
            disk.store(self.at, bytes)?;
            self.at += bytes.len() as u64;
            return Ok(());
        }
        self.others += bytes.len() as u64;
        if self.others > OTHERS_MAX {
            let text = format!("a layer has more than {} GiB beside the disk", OTHERS_MAX >> 30);
            return Err(Error::new(Kind::Unsupported, text)
                .with_remedy("push the disk in a layer of its own"));
        }
        Ok(())
    }
}

/// A path without empty parts and dots; none: it leaves the image.
fn normal(name: &[u8]) -> Option<Vec<u8>> {
    let parts: Vec<&[u8]> =
        name.split(|&byte| byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    (!parts.contains(&&b".."[..])).then(|| parts.join(&b'/'))
}

/// The directory of a path, and the name in it.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

fn is_below(path: &[u8], folder: &[u8]) -> bool {
    folder.is_empty() || path.strip_prefix(folder).is_some_and(|rest| rest.starts_with(b"/"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;
    use LayerMemberKind::*;

    type Member = (&'static str, LayerMemberKind, &'static str);

    fn disk(wanted: Option<&str>, layers: &[&[Member]]) -> Result<(String, Vec<u8>)> {
        let mut files = ImageFiles::new(wanted)?;
        for members in layers {
            let mut layer = files.layer(&ContentDigest::of(b""));
            for (name, kind, text) in *members {
                let is_file = *kind == File;
                let size = if is_file { text.len() as u64 } else { 0 };
                let link = if is_file { Vec::new() } else { text.as_bytes().to_vec() };
                layer.begin(LayerMember {
                    name: name.as_bytes().to_vec(),
                    link,
                    size,
                    kind: *kind,
                })?;
                if is_file {
                    layer.data(text.as_bytes())?;
                }
            }
            layer.finish();
        }
        let (path, disk) = files.disk()?;
        let mut bytes = vec![0; usize::try_from(disk.size).unwrap()];
        let read = rustix::io::pread(&disk.file, &mut bytes, 0).unwrap();
        assert_eq!(read, bytes.len());
        Ok((path, bytes))
    }

    #[track_caller]
    fn has(layers: &[&[Member]], path: &str, text: &str) {
        assert_eq!(disk(None, layers).unwrap(), (path.to_owned(), text.as_bytes().to_vec()));
    }

    #[track_caller]
    fn refuses(wanted: Option<&str>, layers: &[&[Member]], why: &str) {
        let error = disk(wanted, layers).unwrap_err();
        assert!(error.to_string().contains(why) && error.is_complete(), "{error}");
    }

    #[test]
    fn the_only_file_in_the_directory_is_the_disk() {
        for name in ["disk/a", "./disk/a", "/disk/a", "disk//a", "././disk/./a"] {
            has(
                &[&[
                    ("etc/passwd", File, "x"),
                    ("disk/", Directory, ""),
                    (name, File, "abc"),
                    ("z", File, "y"),
                ]],
                "/disk/a",
                "abc",
            );
        }
        refuses(
            None,
            &[&[("disk/a", File, "1"), ("disk/b", File, "2")]],
            "2 files that may be the disk (/disk/a, /disk/b)",
        );
        refuses(
            None,
            &[&[("disk", Directory, ""), ("disk/x/y", File, "1"), ("diskette/a", File, "1")]],
            "has no disk",
        );
        refuses(None, &[&[("../disk/a", File, "1"), ("disk/../disk/a", File, "1")]], "has no disk");
        refuses(None, &[], "has no disk");
        let two: &[&[Member]] =
            &[&[("disk/a", File, "1"), ("disk/b", File, "2"), ("x/y", File, "3")]];
        assert_eq!(disk(Some("b"), two).unwrap().1, b"2");
        assert_eq!(disk(Some("/x/y"), two).unwrap(), ("/x/y".to_owned(), b"3".to_vec()));
        refuses(Some("c"), two, "no file /disk/c");
        for wrong in ["../x", "/", "a/../b"] {
            refuses(Some(wrong), two, "no path of a file");
        }
    }

    #[test]
    fn later_layers_replace_and_remove_files() {
        let below: &[Member] = &[("disk/a", File, "old")];
        has(&[below, &[("disk/a", File, "newer")]], "/disk/a", "newer");
        has(&[below, &[("x", File, "")]], "/disk/a", "old");
        has(&[below, &[("disk/.wh.a", File, ""), ("disk/b", File, "new")]], "/disk/b", "new");
        has(
            &[below, &[("disk/b", File, "new"), ("disk/.wh..wh..opq", File, "")]],
            "/disk/b",
            "new",
        );
        has(&[below, &[(".wh.disk", File, "")], &[("disk/c", File, "c")]], "/disk/c", "c");
        has(&[below, &[(".wh..wh..opq", File, ""), ("disk/c", File, "c")]], "/disk/c", "c");
        refuses(None, &[below, &[("disk/.wh.a", File, "")]], "has no disk");
        refuses(None, &[below, &[("disk", SymbolicLink, "x")]], "has no disk");
        refuses(None, &[below, &[("disk/a", Directory, "")]], "has no disk");
        // A removal concerns the layers below, and no others of its name.
        has(&[&[("disk/.wh.a", File, ""), ("disk/a", File, "1")]], "/disk/a", "1");
        has(&[below, &[("disk/.wh.ab", File, ""), ("disk.wh.a", File, "")]], "/disk/a", "old");
        has(&[&[("disk/a", File, "1"), ("disk/a", File, "twice")]], "/disk/a", "twice");
    }

    #[test]
    fn links_are_followed_inside_the_directory_and_others_are_refused() {
        refuses(
            Some("b"),
            &[&[("disk/b", File, "1")], &[("disk/b", HardLink, "disk/b")]],
            "a hard link to a file elsewhere",
        );
        let linked: &[&[Member]] = &[
            &[("disk/a", File, "1"), ("disk/b", HardLink, "./disk/a")],
            &[("disk/.wh.a", File, "")],
        ];
        has(linked, "/disk/b", "1");
        refuses(
            None,
            &[&[("x", File, "1"), ("disk/b", HardLink, "x")]],
            "a hard link to a file elsewhere",
        );
        refuses(None, &[&[("disk/b", SymbolicLink, "x")]], "a symbolic link");
        refuses(None, &[&[("disk/b", Sparse, "")]], "sparse");
        refuses(None, &[&[("disk/b", Other, "")]], "a device");
        refuses(Some("/d"), &[&[("d", Directory, "")]], "a directory");
    }

    #[test]
    fn zeroes_take_no_space() {
        let disk = StoredDisk::new(64 << 20, &ContentDigest::of(b"")).unwrap();
        disk.store(0, &vec![0; 1 << 20]).unwrap();
        disk.store(1 << 20, &[1; 10]).unwrap();
        let known = rustix::fs::fstat(&disk.file).unwrap();
        assert!(known.st_size == 64 << 20 && known.st_blocks < 2048, "{}", known.st_blocks);
    }
}
