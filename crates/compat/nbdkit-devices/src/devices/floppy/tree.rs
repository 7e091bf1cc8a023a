//! The contents of a floppy: the files and directories below a directory.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use blockhaul_block::{Error, FileId, Kind, Result};

/// Maximum number of files and directories: their names and tables are in memory.
const NODES_MAX: usize = 1 << 20;
/// Maximum file length: the size has 32 bits.
const FILE_MAX: u64 = u32::MAX as u64;
/// Maximum name length in UTF-16 units.
const NAME_MAX: usize = 255;

/// A directory and its contents. The first one is the root.
pub(super) struct Folder {
    /// Its name; empty for the root.
    pub name: String,
    /// Index of its parent directory; the root's is the root.
    pub parent: usize,
    pub times: Times,
    /// Indexes of its directories, and of its files; by name.
    pub folders: Vec<usize>,
    pub files: Vec<usize>,
}

pub(super) struct File {
    pub name: String,
    pub path: PathBuf,
    pub id: FileId,
    pub size: u64,
    pub times: Times,
}

/// Times of creation, access and modification, in FAT's format.
#[derive(Clone, Copy)]
pub(super) struct Times {
    pub created: Stamp,
    pub accessed: Stamp,
    pub modified: Stamp,
}

/// Files and directories below a directory. Other objects are ignored.
#[derive(Default)]
pub(super) struct Tree {
    pub folders: Vec<Folder>,
    pub files: Vec<File>,
}

impl Tree {
    /// Reads a directory and everything below it; blocks. Links are not followed, but the directory
    /// itself may be one.
    pub fn of(root: &Path) -> Result<Tree> {
        let mut tree = Tree::default();
        let cannot = |path: &Path, error| {
            Error::system(format!("floppy: cannot get the status of {}", path.display()), error)
        };
        let metadata = root.metadata().map_err(|error| cannot(root, error))?;
        tree.folders.push(Folder::new(String::new(), 0, Times::of(&metadata)));
        // Directories that are still to be read.
        let mut left = vec![(0, root.to_path_buf())];
        while let Some((index, path)) = left.pop() {
            let mut entries = Vec::new();
            for entry in path.read_dir().map_err(|error| cannot(&path, error))? {
                entries.push(entry.map_err(|error| cannot(&path, error))?);
            }
            // In a reproducible order.
            entries.sort_by_key(std::fs::DirEntry::file_name);
            for entry in entries {
                let path = entry.path();
                let metadata = entry.metadata().map_err(|error| cannot(&path, error))?;
                let times = Times::of(&metadata);
                if !metadata.is_dir() && !metadata.is_file() {
                    log::debug!("{} is not a regular file and is skipped", path.display());
                    continue;
                }
                if tree.folders.len() + tree.files.len() >= NODES_MAX {
                    let text = format!("floppy: more than {NODES_MAX} files and directories");
                    return Err(Error::new(Kind::Usage, text));
                }
                let name = name(&path)?;
                if metadata.is_dir() {
                    let folder = tree.folders.len();
                    tree.folders[index].folders.push(folder);
                    tree.folders.push(Folder::new(name, index, times));
                    left.push((folder, path));
                    continue;
                }
                let size = metadata.len();
                if size > FILE_MAX {
                    let text = format!("floppy: {} is larger than FAT allows", path.display());
                    return Err(Error::new(Kind::Usage, text));
                }
                tree.folders[index].files.push(tree.files.len());
                let id = (metadata.dev(), metadata.ino());
                tree.files.push(File { name, path, size, id, times });
            }
        }
        Ok(tree)
    }
}

impl Folder {
    fn new(name: String, parent: usize, times: Times) -> Folder {
        Folder { name, parent, times, folders: Vec::new(), files: Vec::new() }
    }
}

/// The last component of a path, as a FAT name.
fn name(path: &Path) -> Result<String> {
    let name = path.file_name().and_then(|name| name.to_str());
    let fits = name.filter(|name| name.encode_utf16().count() <= NAME_MAX);
    fits.map(String::from).ok_or_else(|| {
        let text = format!("floppy: the name of {} is not UTF-8, or too long", path.display());
        Error::new(Kind::Usage, text)
    })
}

impl Times {
    fn of(metadata: &std::fs::Metadata) -> Times {
        let modified = Stamp::of(metadata.modified().ok());
        Times {
            created: metadata.created().map_or(modified, |time| Stamp::of(Some(time))),
            accessed: Stamp::of(metadata.accessed().ok()),
            modified,
        }
    }
}

/// A time in FAT's format, in UTC; it supports the years 1980 to 2107.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub date: u16,
    /// In units of two seconds.
    pub time: u16,
    /// The odd second, in units of 10 ms.
    pub fine: u8,
}

impl Stamp {
    fn of(time: Option<SystemTime>) -> Stamp {
        const FIRST: u64 = 315_532_800;
        const LAST: u64 = 4_354_819_199;
        let seconds = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let seconds = seconds.map_or(0, |time| time.as_secs()).clamp(FIRST, LAST);
        let day = seconds / 86_400;
        let second = seconds % 86_400;
        // Days since 1 March of year 0 in the Gregorian calendar, whose pattern repeats after 400 years.
        let shifted = day + 719_468;
        let era = shifted / 146_097;
        let of_era = shifted % 146_097;
        let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let march = (5 * of_year + 2) / 153;
        let day = of_year - (153 * march + 2) / 5 + 1;
        let month = if march < 10 { march + 3 } else { march - 9 };
        let year = era * 400 + year + u64::from(month <= 2);
        Stamp {
            date: ((year - 1980) << 9 | month << 5 | day) as u16,
            time: ((second / 3600) << 11 | (second / 60 % 60) << 5 | (second % 60 / 2)) as u16,
            fine: (second % 2 * 100) as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_are_those_of_the_calendar() {
        let stamp = |seconds| Stamp::of(Some(UNIX_EPOCH + Duration::from_secs(seconds)));
        let date = |year: u16, month: u16, day: u16| (year - 1980) << 9 | month << 5 | day;
        let time = |hour: u16, minute: u16, second: u16| hour << 11 | minute << 5 | (second / 2);
        // date -u -d @951782399
        assert_eq!(stamp(951_782_399).date, date(2000, 2, 28));
        assert_eq!(stamp(951_782_400).date, date(2000, 2, 29));
        assert_eq!(stamp(951_868_800).date, date(2000, 3, 1));
        assert_eq!(stamp(1_000_000_001).date, date(2001, 9, 9));
        assert_eq!(stamp(1_000_000_001).time, time(1, 46, 41));
        assert_eq!(stamp(1_000_000_001).fine, 100);
        assert_eq!(Stamp::of(None).date, date(1980, 1, 1));
        assert_eq!(stamp(u64::from(u32::MAX) * 2).date, date(2107, 12, 31));
    }
}
