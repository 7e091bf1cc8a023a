//! Files with known content: images to copy, wrong bytes to be replaced, and the comparison that
//! tells whether a copy is right.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::plan::ImagePlan;
use blockhaul_measure::RandomGenerator;
use blockhaul_measure::{MeasureError, Result};

/// Bytes that are written and compared at a time.
const CHUNK: usize = 1 << 20;
/// What a file is filled with so that a copy must replace it.
const WRONG: u8 = 0xa5;

/// Makes an image: runs of random bytes at random places, the rest holes. The same plan makes the
/// same image everywhere.
pub fn make_image(plan: &ImagePlan) -> Result<()> {
    let failed = |error: std::io::Error| MeasureError::file("make the image", &plan.path, error);
    let file = fresh(&plan.path, plan.size)?;
    let mut random = RandomGenerator::new(plan.seed);
    let slots = plan.size.div_ceil(plan.run);
    let mut left = plan.data;
    let mut buffer = vec![0; CHUNK];
    for slot in 0..slots {
        // Each slot is taken with the chance that leaves the right amount in the end, and for sure
        // once all that remain are needed.
        let start = slot * plan.run;
        let remaining = plan.size - start;
        let room = plan.run.min(remaining);
        if left == 0 || (remaining - room >= left && random.below(remaining) >= left) {
            continue;
        }
        let end = start + room.min(left);
        left -= end - start;
        let mut at = start;
        while at < end {
            let len = (end - at).min(CHUNK as u64) as usize;
            random.fill(&mut buffer[..len]);
            file.write_all_at(&buffer[..len], at).map_err(failed)?;
            at += len as u64;
        }
    }
    Ok(())
}

/// Makes an empty sparse file.
pub fn fresh(path: &Path, size: u64) -> Result<File> {
    remove(path)?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|error| MeasureError::file("make", path, error))?;
    file.set_len(size).map_err(|error| MeasureError::file("set the size of", path, error))?;
    Ok(file)
}

/// Removes a file if it is there.
pub fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(MeasureError::file("remove", path, error))
        }
        _ => Ok(()),
    }
}

/// Makes a file durable and asks the kernel to forget what it caches of it.
pub fn evict(path: &Path) -> Result<()> {
    let failed = |error: std::io::Error| MeasureError::file("take out of the cache", path, error);
    let file = open(path)?;
    file.sync_all().map_err(failed)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
        .map_err(|error| failed(error.into()))
}

/// Puts wrong bytes into a file wherever `like` has data, and makes it a hole elsewhere. What the
/// file has allocated already is kept.
pub fn overwrite(path: &Path, like: &Path) -> Result<()> {
    let failed = |error: std::io::Error| MeasureError::file("overwrite", path, error);
    let model = open(like)?;
    let size = len(&model, like)?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(failed)?;
    file.set_len(size).map_err(failed)?;
    let wrong = vec![WRONG; CHUNK];
    let mut at = 0;
    while at < size {
        let (data, end) = next_data(&model, at, size);
        if data > at {
            punch(&file, at, data - at).map_err(failed)?;
        }
        let mut here = data;
        while here < end {
            let len = (end - here).min(CHUNK as u64) as usize;
            file.write_all_at(&wrong[..len], here).map_err(failed)?;
            here += len as u64;
        }
        at = end;
    }
    Ok(())
}

/// Makes a range read as zeroes, without blocks where the file system can do that.
fn punch(file: &File, at: u64, len: u64) -> std::io::Result<()> {
    use rustix::fs::FallocateFlags;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file.as_fd(), flags, at, len) {
        Err(Errno::OPNOTSUPP) => {
            let zeroes = vec![0; CHUNK];
            let mut done = 0;
            while done < len {
                let part = (len - done).min(CHUNK as u64) as usize;
                file.write_all_at(&zeroes[..part], at + done)?;
                done += part as u64;
            }
            Ok(())
        }
        other => other.map_err(Into::into),
    }
}

/// Compares two files byte for byte. The error names the first byte that differs.
pub fn compare(expected: &Path, found: &Path) -> Result<()> {
    let model = open(expected)?;
    let file = open(found)?;
    let size = len(&model, expected)?;
    let len = len(&file, found)?;
    // A target may be larger than its source; the rest is not part of the copy.
    if len < size {
        return Err(MeasureError::new(format!("{} has {len} bytes of {size}", found.display())));
    }
    let mut buffers = (vec![0; CHUNK], vec![0; CHUNK]);
    let mut at = 0;
    while at < size {
        let (model_data, model_end) = next_data(&model, at, size);
        let (file_data, file_end) = next_data(&file, at, size);
        let data = model_data.min(file_data);
        if data > at {
            // Holes in both.
            at = data;
            continue;
        }
        let limit = match (model_data == at, file_data == at) {
            (true, true) => model_end.min(file_end),
            (true, false) => model_end.min(file_data),
            _ => file_end.min(model_data),
        };
        while at < limit {
            let len = (limit - at).min(CHUNK as u64) as usize;
            let a = &mut buffers.0[..len];
            let b = &mut buffers.1[..len];
            model.read_exact_at(a, at).map_err(|e| MeasureError::file("read", expected, e))?;
            file.read_exact_at(b, at).map_err(|e| MeasureError::file("read", found, e))?;
            if a != b {
                let differs = a.iter().zip(b.iter()).position(|(a, b)| a != b).unwrap_or(0);
                return Err(MeasureError::new(format!(
                    "{} is not a copy of {}: byte {} is 0x{:02x}, expected 0x{:02x}",
                    found.display(),
                    expected.display(),
                    at + differs as u64,
                    b[differs],
                    a[differs]
                )));
            }
            at += len as u64;
        }
    }
    Ok(())
}

/// Start and end of the next data at or after `at`; an empty range at the end if there is none. A
/// file system that does not know holes has data everywhere.
fn next_data(file: &File, at: u64, size: u64) -> (u64, u64) {
    let start = match rustix::fs::seek(file.as_fd(), SeekFrom::Data(at)) {
        Ok(start) => start.clamp(at, size),
        Err(Errno::NXIO) => return (size, size),
        Err(_) => return (at, size),
    };
    match rustix::fs::seek(file.as_fd(), SeekFrom::Hole(start)) {
        Ok(end) if end > start => (start, end.min(size)),
        _ => (start, size),
    }
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|error| MeasureError::file("open", path, error))
}

fn len(file: &File, path: &Path) -> Result<u64> {
    Ok(file.metadata().map_err(|error| MeasureError::file("examine", path, error))?.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    fn plan(path: &Path, size: u64, data: u64, seed: u64) -> ImagePlan {
        ImagePlan { path: path.to_owned(), size, data, run: 64 << 10, seed }
    }

    #[test]
    fn images_have_the_data_asked_for_and_repeat() {
        let dir = tempfile::tempdir().unwrap();
        let a = dir.path().join("a");
        let b = dir.path().join("b");
        let c = dir.path().join("c");
        make_image(&plan(&a, 8 << 20, 2 << 20, 1)).unwrap();
        make_image(&plan(&b, 8 << 20, 2 << 20, 1)).unwrap();
        make_image(&plan(&c, 8 << 20, 2 << 20, 2)).unwrap();
        assert_eq!(a.metadata().unwrap().len(), 8 << 20);
        let bytes = std::fs::read(&a).unwrap();
        let zeroes = bytes.iter().filter(|byte| **byte == 0).count();
        let random = bytes.len() - zeroes;
        assert!((2 << 20) - random < 20_000, "one byte in 256 is a zero by chance: {random}");
        assert!(a.metadata().unwrap().blocks() * 512 < 3 << 20);
        compare(&a, &b).unwrap();
        compare(&b, &a).unwrap();
        assert!(compare(&a, &c).is_err());
    }

    #[test]
    fn an_image_may_be_all_data_and_of_odd_size() {
        let dir = tempfile::tempdir().unwrap();
        let a = dir.path().join("a");
        make_image(&plan(&a, 100_001, 100_001, 1)).unwrap();
        let bytes = std::fs::read(&a).unwrap();
        assert_eq!(bytes.len(), 100_001);
        assert!(bytes.windows(64).all(|window| window.iter().any(|byte| *byte != 0)));
    }

    #[test]
    fn one_wrong_byte_is_found_anywhere() {
        let dir = tempfile::tempdir().unwrap();
        let a = dir.path().join("a");
        let b = dir.path().join("b");
        for at in [0, 65_535, (1 << 20) + 7, (4 << 20) - 1] {
            make_image(&plan(&a, 4 << 20, 1 << 20, 1)).unwrap();
            make_image(&plan(&b, 4 << 20, 1 << 20, 1)).unwrap();
            let file = OpenOptions::new().read(true).write(true).open(&b).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            let text = compare(&a, &b).unwrap_err().to_string();
            assert!(text.contains(&format!("byte {at} ")), "{text}");
            assert!(compare(&b, &a).is_err());
        }
    }

    #[test]
    fn a_short_file_is_no_copy() {
        let dir = tempfile::tempdir().unwrap();
        let a = dir.path().join("a");
        let b = dir.path().join("b");
        fresh(&a, 1000).unwrap();
        fresh(&b, 999).unwrap();
        assert!(compare(&a, &b).unwrap_err().to_string().contains("999 bytes of 1000"));
        fresh(&b, 1001).unwrap();
        compare(&a, &b).unwrap();
    }

    #[test]
    fn overwriting_leaves_no_right_byte_and_keeps_holes() {
        let dir = tempfile::tempdir().unwrap();
        let a = dir.path().join("a");
        let b = dir.path().join("b");
        make_image(&plan(&a, 4 << 20, 1 << 20, 1)).unwrap();
        std::fs::write(&b, vec![7; 5 << 20]).unwrap();
        overwrite(&b, &a).unwrap();
        let model = std::fs::read(&a).unwrap();
        let bytes = std::fs::read(&b).unwrap();
        assert_eq!(model.len(), bytes.len());
        assert!(compare(&a, &b).is_err());
        let wrong = bytes.iter().filter(|byte| **byte == WRONG).count();
        assert_eq!(wrong, 1 << 20);
        assert!(bytes.iter().all(|byte| *byte == WRONG || *byte == 0));
    }
}
