//! Random operations on a file, each carried out on a model of it in memory, too: what is read has to be
//! what the model has. As fsx does, with a seed that repeats a run.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use blockhaul_testkit::rng::Rng;
use rustix::fs::{FallocateFlags as How, OFlags, fallocate};
use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _};

/// Maximum length of an operation, in bytes.
const LEN_MAX: u64 = 256 << 10;
/// Unit of mapped ranges, and of operations that move the rest of a file.
const PAGE: u64 = 4096;
/// Steps between two comparisons of the whole content.
const WHOLE: u64 = 200;
/// Operations that are shown after a difference.
const SHOWN: usize = 30;

/// What a file allows.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Its size changes, up to this many bytes; none: it has one size, as a disk.
    pub size_max: Option<u64>,
    /// It can be mapped into memory, for writing.
    pub maps: bool,
    /// Direct I/O takes any offset and length.
    pub direct: bool,
}

/// A file with its model.
pub struct Exercise {
    path: PathBuf,
    file: File,
    /// For direct I/O.
    direct: Option<File>,
    model: Vec<u8>,
    rules: Rules,
    log: VecDeque<String>,
    count: u64,
}

impl Exercise {
    /// Takes the file as it is.
    ///
    /// # Panics
    /// Where it cannot be opened and read.
    pub fn new(path: &Path, rules: Rules) -> Exercise {
        let model = fs::read(path).expect("the file can be read");
        let (file, direct) = open(path, rules).expect("the file can be opened");
        let path = path.to_owned();
        Exercise { path, file, direct, model, rules, log: VecDeque::new(), count: 0 }
    }

    /// Carries out so many operations.
    ///
    /// # Panics
    /// Where one fails, or the file differs from its model.
    pub fn run(&mut self, rng: &mut Rng, steps: u64) {
        for _ in 0..steps {
            self.count += 1;
            if let Err(error) = self.step(rng) {
                self.fail(&error.to_string());
            }
            if self.count.is_multiple_of(WHOLE) {
                self.compare();
            }
        }
        self.compare();
    }

    /// Opens the file again and compares all of it.
    ///
    /// # Panics
    /// Where it differs from its model.
    pub fn compare(&mut self) {
        let (file, direct) = open(&self.path, self.rules).expect("the file can be opened");
        (self.file, self.direct) = (file, direct);
        let content = fs::read(&self.path).expect("the file can be read");
        if content.len() != self.model.len() {
            self.fail(&format!("it has {} bytes, not {}", content.len(), self.model.len()));
        }
        if let Some(at) = (0..content.len()).find(|&at| content[at] != self.model[at]) {
            self.fail(&format!("byte {at} is {:#x}, not {:#x}", content[at], self.model[at]));
        }
    }

    /// The content that the file has.
    pub fn model(&self) -> &[u8] {
        &self.model
    }

    fn fail(&self, why: &str) -> ! {
        for line in &self.log {
            println!("{line}");
        }
        panic!("{} after {} operations: {why}", self.path.display(), self.count);
    }

    fn note(&mut self, what: &str, at: u64, len: u64) {
        if self.log.len() == SHOWN {
            self.log.pop_front();
        }
        self.log.push_back(format!("{}: {what} {at}+{len}", self.count));
    }

    fn size(&self) -> u64 {
        self.model.len() as u64
    }

    /// A range inside the file, if it is not empty; short ones and those at the ends are as likely as
    /// others.
    fn inside(&self, rng: &mut Rng) -> Option<(u64, u64)> {
        let size = self.size();
        if size == 0 {
            return None;
        }
        let most = 1 << rng.between(0, LEN_MAX.ilog2().into());
        let len = rng.between(1, most).min(size);
        let at = match rng.below(10) {
            0 => 0,
            1 => size - len,
            2..5 => rng.below(size - len + 1) / PAGE * PAGE,
            _ => rng.below(size - len + 1),
        };
        Some((at, len))
    }

    /// A range for a write, which may make the file larger.
    fn writable(&self, rng: &mut Rng) -> Option<(u64, u64)> {
        match self.rules.size_max {
            Some(most) if rng.chance(20) => {
                let at = rng.below((self.size() + PAGE).min(most));
                Some((at, rng.between(1, LEN_MAX.min(most - at))))
            }
            _ => self.inside(rng),
        }
    }

    fn step(&mut self, rng: &mut Rng) -> io::Result<()> {
        match rng.below(if self.rules.size_max.is_some() { 20 } else { 16 }) {
            0..4 => self.read(rng),
            4..8 => self.write(rng),
            8 => self.read_mapped(rng),
            9 => self.write_mapped(rng),
            10 => self.free(rng, How::PUNCH_HOLE | How::KEEP_SIZE, "punch"),
            11 => self.free(rng, How::ZERO_RANGE | How::KEEP_SIZE, "zero"),
            12 => self.copy(rng),
            13 => {
                self.note("fsync", 0, 0);
                self.file.sync_all()
            }
            14 => {
                self.note("fdatasync", 0, 0);
                self.file.sync_data()
            }
            15 => {
                self.note("reopen", 0, 0);
                (self.file, self.direct) = open(&self.path, self.rules)?;
                Ok(())
            }
            16..18 => self.truncate(rng),
            18 => self.preallocate(rng),
            _ => self.shift(rng),
        }
    }

    /// The file for an operation: now and then the one for direct I/O.
    fn handle(&self, rng: &mut Rng) -> (&File, &'static str) {
        match &self.direct {
            Some(direct) if rng.chance(30) => (direct, "direct "),
            _ => (&self.file, ""),
        }
    }

    fn read(&mut self, rng: &mut Rng) -> io::Result<()> {
        let Some((at, len)) = self.inside(rng) else { return Ok(()) };
        let mut bytes = vec![0; len as usize];
        let (file, how) = self.handle(rng);
        file.read_exact_at(&mut bytes, at)?;
        self.note(&format!("{how}read"), at, len);
        self.check(at, &bytes);
        Ok(())
    }

    fn check(&self, at: u64, bytes: &[u8]) {
        let expected = &self.model[at as usize..][..bytes.len()];
        if let Some(place) = (0..bytes.len()).find(|&place| bytes[place] != expected[place]) {
            let at = at as usize + place;
            self.fail(&format!(
                "byte {at} reads as {:#x}, not {:#x}",
                bytes[place], expected[place]
            ));
        }
    }

    fn write(&mut self, rng: &mut Rng) -> io::Result<()> {
        let Some((at, len)) = self.writable(rng) else { return Ok(()) };
        let mut bytes = vec![0; len as usize];
        rng.fill(&mut bytes);
        let (file, how) = self.handle(rng);
        file.write_all_at(&bytes, at)?;
        self.note(&format!("{how}write"), at, len);
        self.store(at, &bytes);
        Ok(())
    }

    fn store(&mut self, at: u64, bytes: &[u8]) {
        let end = at as usize + bytes.len();
        if self.model.len() < end {
            self.model.resize(end, 0);
        }
        self.model[at as usize..end].copy_from_slice(bytes);
    }

    /// The mapped pages that a range lies in, and where it begins in them.
    fn mapped(&self, at: u64, len: u64) -> io::Result<(MmapRegion, usize)> {
        let start = at / PAGE * PAGE;
        let file = FileOffset::new(self.file.try_clone()?, start);
        let region = MmapRegion::from_file(file, (at + len - start) as usize);
        Ok((region.map_err(io::Error::other)?, (at - start) as usize))
    }

    fn read_mapped(&mut self, rng: &mut Rng) -> io::Result<()> {
        let Some((at, len)) = self.inside(rng).filter(|_| self.rules.maps) else { return Ok(()) };
        self.note("mapped read", at, len);
        let (region, start) = self.mapped(at, len)?;
        let mut bytes = vec![0; len as usize];
        region.as_volatile_slice().read_slice(&mut bytes, start).map_err(io::Error::other)?;
        self.check(at, &bytes);
        Ok(())
    }

    fn write_mapped(&mut self, rng: &mut Rng) -> io::Result<()> {
        let Some((at, len)) = self.inside(rng).filter(|_| self.rules.maps) else { return Ok(()) };
        self.note("mapped write", at, len);
        let mut bytes = vec![0; len as usize];
        rng.fill(&mut bytes);
        let (region, start) = self.mapped(at, len)?;
        region.as_volatile_slice().write_slice(&bytes, start).map_err(io::Error::other)?;
        drop(region);
        // POSIX promises others nothing before this.
        self.file.sync_data()?;
        self.store(at, &bytes);
        Ok(())
    }

    fn free(&mut self, rng: &mut Rng, how: How, name: &str) -> io::Result<()> {
        let Some((at, len)) = self.inside(rng) else { return Ok(()) };
        self.note(name, at, len);
        fallocate(&self.file, how, at, len)?;
        self.model[at as usize..][..len as usize].fill(0);
        Ok(())
    }

    /// Copies a range to a place behind or before it.
    fn copy(&mut self, rng: &mut Rng) -> io::Result<()> {
        let Some((from, len)) = self.inside(rng) else { return Ok(()) };
        let to = if rng.chance(50) { from + len } else { from.saturating_sub(len) };
        let len = len.min(self.size().saturating_sub(to)).min(from.abs_diff(to));
        self.note(&format!("copy to {to} from"), from, len);
        let (mut source, mut target, mut left) = (from, to, len as usize);
        while left > 0 {
            let copied = rustix::fs::copy_file_range(
                &self.file,
                Some(&mut source),
                &self.file,
                Some(&mut target),
                left,
            )?;
            if copied == 0 {
                return Err(io::Error::other("nothing is copied"));
            }
            left -= copied;
        }
        self.model.copy_within(from as usize..(from + len) as usize, to as usize);
        Ok(())
    }

    fn truncate(&mut self, rng: &mut Rng) -> io::Result<()> {
        let Some(most) = self.rules.size_max else { return Ok(()) };
        let size = rng.below(most + 1);
        self.note("truncate to", size, 0);
        self.file.set_len(size)?;
        self.model.resize(size as usize, 0);
        Ok(())
    }

    fn preallocate(&mut self, rng: &mut Rng) -> io::Result<()> {
        let Some(most) = self.rules.size_max else { return Ok(()) };
        let at = rng.below(most);
        let len = rng.between(1, LEN_MAX.min(most - at));
        self.note("allocate", at, len);
        fallocate(&self.file, How::empty(), at, len)?;
        let size = self.size().max(at + len);
        self.model.resize(size as usize, 0);
        Ok(())
    }

    /// Takes blocks out of the file, or puts some in.
    fn shift(&mut self, rng: &mut Rng) -> io::Result<()> {
        let Some(most) = self.rules.size_max else { return Ok(()) };
        let pages = self.size() / PAGE;
        if pages < 4 {
            return Ok(());
        }
        let at = rng.below(pages - 2) * PAGE;
        let len = rng.between(1, (pages - 1 - at / PAGE).min(16)) * PAGE;
        let place = at as usize;
        if rng.chance(50) {
            self.note("collapse", at, len);
            fallocate(&self.file, How::COLLAPSE_RANGE, at, len)?;
            self.model.drain(place..place + len as usize);
        } else if self.size() + len <= most {
            self.note("insert", at, len);
            fallocate(&self.file, How::INSERT_RANGE, at, len)?;
            self.model.splice(place..place, vec![0; len as usize]);
        }
        Ok(())
    }
}

fn open(path: &Path, rules: Rules) -> io::Result<(File, Option<File>)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let file = options.open(path)?;
    let flags = OFlags::DIRECT.bits().cast_signed();
    let direct = rules.direct.then(|| options.custom_flags(flags).open(path)).transpose()?;
    Ok((file, direct))
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockhaul_testkit::rng::seed;
    use blockhaul_testkit::tools::ScratchDir;

    #[test]
    fn a_byte_that_changes_by_itself_is_found() {
        let scratch = ScratchDir::on_disk().unwrap();
        let path = scratch.file("f");
        fs::write(&path, vec![0; 1 << 20]).unwrap();
        let seed = seed();
        println!("BLOCKHAUL_SEED={seed:#x}");
        let mut rng = Rng::new(seed);
        let rules = Rules { size_max: None, maps: true, direct: false };
        let mut exercise = Exercise::new(&path, rules);
        exercise.run(&mut rng, 300);
        let at = exercise.size() / 3;
        let other = [!exercise.model()[at as usize]];
        File::options().write(true).open(&path).unwrap().write_all_at(&other, at).unwrap();
        let compared =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| exercise.compare()));
        assert!(compared.is_err());
    }
}
