//! Disk images on disk: random sparse ones, a real ext4, and how to compare and measure them.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::SeekFrom;

use crate::rng::Rng;
use crate::tools::{self, PeerProgram, ScratchDir};

/// Makes a sparse image: runs of random bytes, of written zeroes and of holes, from one byte to 1
/// MiB long and often unaligned. The same seed gives the same contents. Returns the ranges with
/// random bytes, none of which is zero.
///
/// # Errors
/// If the file cannot be made or written.
pub fn sparse(path: &Path, size: u64, seed: u64) -> io::Result<Vec<Range<u64>>> {
    let file = File::create(path)?;
    file.set_len(size)?;
    let mut rng = Rng::new(seed);
    let mut data: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < size {
        let bound = *rng.pick(&[1, 512, 4096, 64 << 10, 256 << 10, 1 << 20]);
        let grain = *rng.pick(&[1, 512, 4096, 64 << 10]);
        let len = rng.between(1, bound).next_multiple_of(grain).min(size - at);
        match rng.below(10) {
            0..4 => {
                let mut bytes = vec![0; len as usize];
                rng.fill(&mut bytes);
                bytes.iter_mut().for_each(|byte| *byte = (*byte).max(1));
                file.write_all_at(&bytes, at)?;
                match data.last_mut().filter(|last| last.end == at) {
                    Some(last) => last.end = at + len,
                    None => data.push(at..at + len),
                }
            }
            4..6 => file.write_all_at(&vec![0; len as usize], at)?,
            _ => {}
        }
        at += len;
    }
    file.sync_all()?;
    Ok(data)
}

/// The first bytes of nbdkit's pattern plugin and of our device `pattern:`: each eight bytes are
/// their offset, big endian.
pub fn pattern(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (number, word) in bytes.chunks_mut(8).enumerate() {
        let offset = (number as u64 * 8).to_be_bytes();
        word.copy_from_slice(&offset[..word.len()]);
    }
    bytes
}

/// Makes an ext4 of `size` bytes that holds up to `content_max` bytes of the files under `folder`
/// (such as `/usr/share/doc` or `/usr/include`), in a sparse file.
///
/// # Errors
/// Why not: no `mkfs.ext4`, too small a size, a folder without files, no room. Callers pass the first
/// one to [`tools::skip_or_fail`] or ask [`PeerProgram::find`] before.
pub fn ext4(path: &Path, size: u64, folder: &Path, content_max: u64) -> Result<(), String> {
    let mkfs = PeerProgram::find("mkfs.ext4").map_err(|reason| reason.to_string())?;
    let staged = ScratchDir::on_disk().map_err(|error| error.to_string())?;
    let content = staged.file("content");
    let mut left = content_max;
    let copied = copy_tree(folder, &content, &mut left, 0);
    copied.map_err(|error| format!("cannot copy {}: {error}", folder.display()))?;
    if left == content_max {
        return Err(format!("{} holds no files", folder.display()));
    }
    let made = File::create(path).and_then(|file| file.set_len(size));
    made.map_err(|error| format!("cannot make {}: {error}", path.display()))?;
    let mut command = mkfs.command();
    // No reserved blocks and no lazy initialisation: the image is complete when the program ends.
    command.args(["-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", "-d"]);
    command.arg(&content).arg(path);
    let output = tools::output(&mut command, Duration::from_secs(120))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("mkfs.ext4: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// Copies regular files, without the deepest levels, until `left` bytes are used up. Skips files
/// that this user may not read.
fn copy_tree(from: &Path, to: &Path, left: &mut u64, depth: usize) -> io::Result<()> {
    const DEPTH_MAX: usize = 6;
    fs::create_dir_all(to)?;
    let mut entries: Vec<_> = fs::read_dir(from)?.filter_map(Result::ok).collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let kind = entry.file_type()?;
        let target = to.join(entry.file_name());
        if kind.is_dir() && depth < DEPTH_MAX {
            match copy_tree(&entry.path(), &target, left, depth + 1) {
                Err(error) if error.kind() != io::ErrorKind::PermissionDenied => {
                    return Err(error);
                }
                _ => {}
            }
        } else if kind.is_file() {
            let len = entry.metadata()?.len();
            if len <= *left && fs::copy(entry.path(), &target).is_ok() {
                *left -= len;
            }
        }
        if *left == 0 {
            break;
        }
    }
    Ok(())
}

/// Where two files differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileDifference {
    /// Their lengths, when they are to be compared as wholes.
    Size(u64, u64),
    /// The first byte that differs: its offset from the start of what is compared, and both bytes.
    Byte {
        /// Offset in bytes.
        at: u64,
        /// In the first file.
        one: u8,
        /// In the second file.
        two: u8,
    },
    /// A file that cannot be read.
    Unreadable(String),
}

impl fmt::Display for FileDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileDifference::Size(one, two) => write!(f, "{one} bytes and {two} bytes"),
            FileDifference::Byte { at, one, two } => {
                write!(f, "the first difference is at {at}: {one:#04x} and {two:#04x}")
            }
            FileDifference::Unreadable(why) => f.write_str(why),
        }
    }
}

/// Compares two files byte for byte.
///
/// # Errors
/// The first difference.
pub fn compare(one: &Path, two: &Path) -> Result<(), FileDifference> {
    let first = open(one)?;
    let second = open(two)?;
    let sizes = (size(&first, one)?, size(&second, two)?);
    if sizes.0 != sizes.1 {
        return Err(FileDifference::Size(sizes.0, sizes.1));
    }
    compare_ranges((one, 0), (two, 0), sizes.0)
}

/// Compares `len` bytes of two files, from an offset in each on.
///
/// # Errors
/// The first difference, its offset counted from the start of the ranges.
pub fn compare_ranges(
    (one, one_at): (&Path, u64),
    (two, two_at): (&Path, u64),
    len: u64,
) -> Result<(), FileDifference> {
    const CHUNK: u64 = 1 << 20;
    let first = open(one)?;
    let second = open(two)?;
    let mut left = vec![0; CHUNK as usize];
    let mut right = vec![0; CHUNK as usize];
    let mut done = 0;
    while done < len {
        let chunk = CHUNK.min(len - done);
        let left = &mut left[..chunk as usize];
        let right = &mut right[..chunk as usize];
        let unreadable = |path: &Path, error: io::Error| {
            FileDifference::Unreadable(format!("cannot read {}: {error}", path.display()))
        };
        first.read_exact_at(left, one_at + done).map_err(|error| unreadable(one, error))?;
        second.read_exact_at(right, two_at + done).map_err(|error| unreadable(two, error))?;
        if left != right {
            let index = left.iter().zip(right.iter()).position(|(one, two)| one != two);
            let index = index.expect("they differ somewhere");
            let at = done + index as u64;
            return Err(FileDifference::Byte { at, one: left[index], two: right[index] });
        }
        done += chunk;
    }
    Ok(())
}

fn open(path: &Path) -> Result<File, FileDifference> {
    let opened = File::open(path);
    opened.map_err(|error| {
        FileDifference::Unreadable(format!("cannot open {}: {error}", path.display()))
    })
}

fn size(file: &File, path: &Path) -> Result<u64, FileDifference> {
    let metadata = file.metadata();
    let metadata = metadata.map_err(|error| {
        FileDifference::Unreadable(format!("cannot look at {}: {error}", path.display()))
    })?;
    Ok(metadata.len())
}

/// Sizes of a file in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSpace {
    /// Its length.
    pub apparent: u64,
    /// Its allocated size on disk.
    pub allocated: u64,
}

/// How large a file is, and how much of that is on disk.
///
/// # Errors
/// When there is no such file.
pub fn space(path: &Path) -> io::Result<FileSpace> {
    let metadata = fs::metadata(path)?;
    // The unit of this field is 512 bytes on every file system.
    Ok(FileSpace { apparent: metadata.len(), allocated: metadata.blocks() * 512 })
}

/// The parts of a file that are not holes, as reported by its file system.
///
/// # Errors
/// If the file cannot be read.
pub fn data_ranges(path: &Path) -> io::Result<Vec<Range<u64>>> {
    let file = OpenOptions::new().read(true).open(path)?;
    let size = file.metadata()?.len();
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(&file, SeekFrom::Hole(start))?;
        ranges.push(start..end);
        at = end;
    }
    Ok(ranges)
}

/// Whether a range of a file reads as zeroes.
///
/// # Errors
/// When it cannot be read.
pub fn is_zero(path: &Path, range: Range<u64>) -> io::Result<bool> {
    let file = File::open(path)?;
    let mut bytes = vec![0; 1 << 20];
    let mut at = range.start;
    while at < range.end {
        let chunk = (range.end - at).min(1 << 20) as usize;
        file.read_exact_at(&mut bytes[..chunk], at)?;
        if bytes[..chunk].iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
        at += chunk as u64;
    }
    Ok(true)
}

/// A digest of a file's contents, to distinguish contents in messages; not secure.
///
/// # Errors
/// If it cannot be read.
pub fn digest(path: &Path) -> io::Result<u64> {
    let file = File::open(path)?;
    let mut bytes = vec![0; 1 << 20];
    let mut at = 0;
    let mut digest = 0xcbf2_9ce4_8422_2325_u64;
    loop {
        let count = file.read_at(&mut bytes, at)?;
        if count == 0 {
            return Ok(digest);
        }
        for &byte in &bytes[..count] {
            // FNV-1a.
            digest = (digest ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        at += count as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_images_are_repeatable_and_sparse() {
        let scratch = ScratchDir::new().unwrap();
        let one = scratch.file("one");
        let two = scratch.file("two");
        let other = scratch.file("other");
        let size = (20 << 20) + 777;
        let data = sparse(&one, size, 5).unwrap();
        assert_eq!(sparse(&two, size, 5).unwrap(), data);
        sparse(&other, size, 6).unwrap();
        compare(&one, &two).unwrap();
        assert_eq!(digest(&one).unwrap(), digest(&two).unwrap());
        assert!(matches!(compare(&one, &other), Err(FileDifference::Byte { .. })));
        assert_ne!(digest(&one).unwrap(), digest(&other).unwrap());
        let space = space(&one).unwrap();
        assert_eq!(space.apparent, size);
        assert!(space.allocated > size / 10 && space.allocated < size, "{space:?}");
        // Between runs of data everything is zero; within them nothing is.
        let mut at = 0;
        for range in &data {
            assert!(is_zero(&one, at..range.start).unwrap());
            assert!(!is_zero(&one, range.start..range.start + 1).unwrap());
            assert!(!is_zero(&one, range.end - 1..range.end).unwrap());
            at = range.end;
        }
        assert!(is_zero(&one, at..size).unwrap());
        let allocated = data_ranges(&one).unwrap();
        for range in &data {
            let covered = allocated.iter().any(|a| a.start <= range.start && range.end <= a.end);
            assert!(covered, "{range:?}");
        }
        assert!(allocated.len() > 3);
    }

    #[test]
    fn the_first_difference_is_told() {
        let scratch = ScratchDir::new().unwrap();
        let one = scratch.file("one");
        let two = scratch.file("two");
        fs::write(&one, vec![1; 3 << 20]).unwrap();
        fs::copy(&one, &two).unwrap();
        compare(&one, &two).unwrap();
        let file = OpenOptions::new().write(true).open(&two).unwrap();
        file.write_all_at(&[9, 9], (2 << 20) + 5).unwrap();
        let expected = FileDifference::Byte { at: (2 << 20) + 5, one: 1, two: 9 };
        assert_eq!(compare(&one, &two), Err(expected));
        let expected = FileDifference::Byte { at: 5, one: 9, two: 1 };
        assert_eq!(compare_ranges((&two, 2 << 20), (&one, 0), 100), Err(expected));
        compare_ranges((&one, 7), (&two, 9), 1 << 20).unwrap();
        file.set_len(5).unwrap();
        assert_eq!(compare(&one, &two), Err(FileDifference::Size(3 << 20, 5)));
        let past_the_end = compare_ranges((&one, 0), (&two, 0), 6);
        assert!(matches!(past_the_end, Err(FileDifference::Unreadable(_))));
    }

    #[test]
    fn an_ext4_holds_real_files() {
        let _mkfs = crate::require_peer!("mkfs.ext4");
        let scratch = ScratchDir::on_disk().unwrap();
        let path = scratch.file("ext4");
        ext4(&path, 64 << 20, Path::new("/usr/share"), 8 << 20).unwrap();
        let mut magic = [0; 2];
        File::open(&path).unwrap().read_exact_at(&mut magic, 1024 + 56).unwrap();
        assert_eq!(magic, [0x53, 0xef], "the superblock of ext4");
        let space = space(&path).unwrap();
        assert!(space.apparent == 64 << 20 && space.allocated < 48 << 20, "{space:?}");
        assert!(space.allocated > 4 << 20, "{space:?}");
        let empty = scratch.file("empty");
        fs::create_dir(&empty).unwrap();
        assert!(ext4(&path, 64 << 20, &empty, 1 << 20).unwrap_err().contains("no files"));
    }
}
