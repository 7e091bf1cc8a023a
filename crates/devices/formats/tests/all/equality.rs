//! Images with every combination of options, as qemu-img and qemu-io make them: the same bytes and
//! the same map as qemu-img shows.

use std::path::Path;

use blockhaul_block::{ContextSet, DeviceExt as _, Extents, HOLE, ZERO};
use blockhaul_testkit::rng::{self, Rng};
use serde_json::Value;

use crate::common::{Qemu, content, extents, with, write};

/// A combination of options.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub cluster: u64,
    pub extended: bool,
    pub zstd: bool,
    /// Of 2 and 3.
    pub version: u32,
    pub lazy: bool,
    pub refcount_bits: u32,
    pub under: Under,
}

/// What the image consists of besides itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Under {
    Nothing,
    RawBacking,
    Qcow2Backing,
    DataFile,
    RawDataFile,
}

impl Case {
    fn options(&self) -> String {
        let switch = |on| if on { "on" } else { "off" };
        let mut text = format!("cluster_size={}", self.cluster);
        if self.version == 2 {
            text += ",compat=0.10";
        } else {
            text += &format!(
                ",compat=1.1,extended_l2={},compression_type={},lazy_refcounts={},refcount_bits={}",
                switch(self.extended),
                if self.zstd { "zstd" } else { "zlib" },
                switch(self.lazy),
                self.refcount_bits
            );
        }
        match self.under {
            Under::Nothing => {}
            Under::RawBacking => text += ",backing_file=base,backing_fmt=raw",
            Under::Qcow2Backing => text += ",backing_file=base,backing_fmt=qcow2",
            Under::DataFile => text += ",data_file=data",
            Under::RawDataFile => text += ",data_file=data,data_file_raw=on",
        }
        text
    }

    pub fn has_data_file(&self) -> bool {
        matches!(self.under, Under::DataFile | Under::RawDataFile)
    }

    /// Some clusters, and a part of one.
    pub fn size(&self) -> u64 {
        (self.cluster * 12).clamp(3 << 20, 24 << 20) + 1536
    }
}

/// All combinations that QEMU allows, but for lazy refcounts and refcount widths, which take turns:
/// reading does not use them.
pub fn cases() -> Vec<Case> {
    let widths = [16, 1, 2, 4, 8, 32, 64];
    let mut cases = Vec::new();
    for cluster in [512, 4096, 16 << 10, 64 << 10, 2 << 20] {
        for (extended, zstd) in [(false, false), (false, true), (true, false), (true, true)] {
            for under in [
                Under::Nothing,
                Under::RawBacking,
                Under::Qcow2Backing,
                Under::DataFile,
                Under::RawDataFile,
            ] {
                if extended && cluster < 16 << 10 {
                    continue;
                }
                let number = cases.len();
                let lazy = number % 2 == 1;
                let refcount_bits = widths[number % widths.len()];
                let case = Case { cluster, extended, zstd, version: 3, lazy, refcount_bits, under };
                cases.push(case);
                if !extended && !zstd && !case.has_data_file() {
                    cases.push(Case { version: 2, lazy: false, refcount_bits: 16, ..case });
                }
            }
        }
    }
    cases
}

/// Files with different bytes at each offset, which compress nevertheless.
const NOISES: u64 = 3;

pub fn make_noise(qemu: &Qemu, rng: &mut Rng) {
    for number in 0..NOISES {
        let bytes: Vec<_> = (0..200_003).map(|_| rng.below(20) as u8).collect();
        write(&qemu.file(&format!("noise{number}")), &bytes);
    }
}

/// Commands of qemu-io that fill a disk: data, compressed data, zeroes, and what was discarded.
fn commands(rng: &mut Rng, case: &Case, may_compress: bool) -> Vec<String> {
    let size = case.size();
    let cluster = case.cluster;
    let clusters = size / cluster;
    let mut commands = Vec::new();
    // First and in order: compressed data never replaces other data.
    let mut free = if may_compress { 0 } else { clusters };
    while commands.len() < 8 && free + 8 < clusters {
        let many = rng.between(1, 4.min(1 + (512 << 10) / cluster));
        let at = free * cluster;
        let len = many * cluster;
        commands.push(format!("write -c -s noise{} {at} {len}", rng.below(NOISES)));
        free += many + rng.below(clusters / 12);
    }
    for _ in 0..rng.between(6, 24) {
        let noise = rng.below(NOISES);
        let first = rng.below(clusters);
        let many = rng.between(1, (clusters - first).min(1 + (512 << 10) / cluster));
        let at = first * cluster;
        let len = many * cluster;
        // Parts of a cluster, in sectors.
        let start = at + rng.below(cluster / 512) * 512;
        let short = rng.between(1, (size - start).min(300 << 10) / 512) * 512;
        commands.push(match rng.between(0, 9) {
            0..4 => format!("write -s noise{noise} {start} {short}"),
            4 => format!("write -s noise{noise} {at} {len}"),
            7 if case.version == 3 => format!("write -z {start} {short}"),
            8 if case.version == 3 => format!("write -z -u {at} {len}"),
            9 => format!("discard {at} {len}"),
            _ => format!("write -s noise{noise} {at} 512"),
        });
    }
    commands
}

/// Makes the image `top`, with what is under it.
pub fn make(qemu: &Qemu, rng: &mut Rng, case: &Case) {
    for name in ["top", "base", "data"] {
        let _ = std::fs::remove_file(qemu.file(name));
    }
    // Shorter and longer ones than the image.
    let base = (case.size() / 512 * rng.between(40, 110) / 100) * 512;
    let plain = Case { zstd: false, version: 3, extended: false, ..*case };
    let fits = |command: &String| {
        let mut words = command.split(' ').rev();
        let number = |word: Option<&str>| word.unwrap().parse::<u64>().unwrap();
        let len = number(words.next());
        number(words.next()) + len <= base
    };
    let below: Vec<_> = commands(rng, &plain, false).into_iter().filter(fits).collect();
    match case.under {
        Under::RawBacking => {
            std::fs::File::create(qemu.file("base")).unwrap().set_len(base).unwrap();
            qemu.io("raw", "base", &below);
        }
        Under::Qcow2Backing => {
            qemu.create("base", &format!("cluster_size={}", case.cluster), base);
            qemu.io("qcow2", "base", &below);
        }
        _ => {}
    }
    qemu.create("top", &case.options(), case.size());
    qemu.io("qcow2", "top", &commands(rng, case, !case.has_data_file()));
}

fn check(qemu: &Qemu, case: &Case, seed: u64) {
    let mut rng = Rng::new(seed);
    make(qemu, &mut rng, case);
    let wanted = qemu.raw("top");
    let map: Vec<Value> =
        serde_json::from_str(&qemu.img(&["map", "-f", "qcow2", "--output=json", "top"])).unwrap();
    let label = format!("{case:?}, seed {seed}");
    let len = wanted.len() as u64;
    let parts: Vec<(u64, u64)> = (0..60)
        .map(|_| {
            let at = rng.below(len);
            (at, rng.between(1, (len - at).min(400 << 10)))
        })
        .collect();
    let spec = qemu.spec("top", "names=allow");
    with(&spec, move |device| async move {
        assert_eq!(device.facts().size, len, "{label}");
        for (at, part) in parts {
            let found = device.read(at, part as usize).await.unwrap();
            let same = found.bytes() == &wanted[at as usize..(at + part) as usize];
            assert!(same, "{label}: {part} bytes at {at}");
        }
        assert!(content(&device).await.unwrap() == wanted, "{label}");
        let base = extents(&device, ContextSet::empty().with(0)).await.unwrap();
        let depth = extents(&device, ContextSet::empty().with(1)).await.unwrap();
        for (at, run) in base.ranges(0).filter(|(_, run)| run.state & ZERO != 0) {
            let bytes = &wanted[at as usize..(at + run.len) as usize];
            assert!(blockhaul_io::is_zero(bytes), "{label}: {run:?} at {at}");
        }
        compare(&label, &map, &base, &depth);
    });
}

/// Compares extents with the output of `qemu-img map`.
fn compare(label: &str, map: &[Value], base: &Extents, depth: &Extents) {
    let states = |list: &Extents, at: u64, len: u64| {
        let mut list = list.clone();
        list.skip(at);
        list.truncate(len);
        list
    };
    for one in map {
        let number = |name: &str| one[name].as_u64().unwrap();
        let at = number("start");
        let len = number("length");
        let found = states(base, at, len);
        let fine = match (one["data"].as_bool().unwrap(), one["zero"].as_bool().unwrap()) {
            // QEMU looks for holes of the file in some cases only; what is zero was compared before.
            (true, _) => found.runs().iter().all(|run| run.state == 0 || run.state == HOLE | ZERO),
            (false, _) => found.runs().iter().all(|run| run.state & ZERO != 0),
        };
        assert!(fine, "{label}: {one}: {found:?}");
        let wanted = if one["present"].as_bool().unwrap() { number("depth") + 1 } else { 0 };
        let found = states(depth, at, len);
        assert!(found.runs().iter().all(|run| run.state == wanted), "{label}: {one}: {found:?}");
    }
}

#[test]
fn every_combination_has_the_bytes_and_the_map_that_qemu_img_shows() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    make_noise(&qemu, &mut Rng::new(seed));
    // A part of the combinations at a time.
    let (rounds, step) =
        if std::env::var_os("BLOCKHAUL_LONG").is_some() { (10, 1) } else { (1, 2) };
    let all = cases();
    assert!(all.len() > 80 && Path::new(qemu.scratch.path()).is_dir());
    for round in 0..rounds {
        for (number, case) in all.iter().enumerate().skip(seed as usize % step).step_by(step) {
            check(&qemu, case, seed.wrapping_add(round * 1000 + number as u64));
        }
    }
}
