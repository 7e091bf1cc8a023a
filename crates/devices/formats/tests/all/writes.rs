//! Images written in place, by random requests next to a model: the same bytes are read by ours and
//! by QEMU's tools, which also find the tables in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhaul_block::{Can, Device, DeviceExt as _, Request, RequestFlags};
use blockhaul_io::Data;
use blockhaul_testkit::rng::{self, Rng};

use crate::common::{Qemu, content, write_with};
use crate::equality::{Case, Under, cases, make, make_noise};

/// Requests of this process.
static REQUESTS: AtomicU64 = AtomicU64::new(0);

/// What a request does to the model.
pub enum Step {
    Bytes(u64, Vec<u8>),
    /// Its contents are looked at afterwards.
    Trim(u64, u64),
}

/// A random request for any range, and what it does.
pub fn request(rng: &mut Rng, size: u64, cluster: u64) -> (Request, Step) {
    let unit = *rng.pick(&[1, 512, 4096, cluster]);
    let at = rng.below(size) / unit * unit;
    let most = (size - at).min(*rng.pick(&[512, 5000, 70_000, cluster * 3, 400_000]));
    let len = rng.between(1, most).next_multiple_of(unit).min(size - at);
    let durable = if rng.chance(5) { RequestFlags::FUA } else { RequestFlags::empty() };
    let zeroes = || Step::Bytes(at, vec![0; len as usize]);
    match rng.below(10) {
        0 | 1 => (Request::zero(at, len).with(durable), zeroes()),
        2 => (Request::zero(at, len).with(RequestFlags::NO_HOLE | durable), zeroes()),
        3 | 4 => (Request::trim(at, len).with(durable), Step::Trim(at, len)),
        _ => {
            let mut bytes = vec![0; len as usize];
            rng.fill(&mut bytes);
            (Request::write(at, Data::copy_of(&bytes)).with(durable), Step::Bytes(at, bytes))
        }
    }
}

/// Some rounds of requests that do not overlap, all in flight at a time.
pub async fn play(
    device: &Arc<dyn Device>,
    rng: &mut Rng,
    model: &mut [u8],
    rounds: u64,
    cluster: u64,
) {
    play_with(device, rng, model, rounds, |rng, size| request(rng, size, cluster)).await;
}

/// The same with requests that `request` makes for a disk of a size.
pub async fn play_with(
    device: &Arc<dyn Device>,
    rng: &mut Rng,
    model: &mut [u8],
    rounds: u64,
    request: impl Fn(&mut Rng, u64) -> (Request, Step),
) {
    let size = model.len() as u64;
    for _ in 0..rounds {
        let mut taken: Vec<(u64, u64)> = Vec::new();
        let mut flying = Vec::new();
        for _ in 0..rng.between(1, 6) {
            let (request, step) = request(rng, size);
            let at = request.at;
            let end = request.at + request.len;
            if taken.iter().all(|&(other, stop)| end <= other || stop <= at) {
                taken.push((at, end));
                let what = format!("{:?} {at}+{}", request.kind(), request.len);
                flying.push((what, device.submit(request), step));
            }
        }
        REQUESTS.fetch_add(flying.len() as u64, Ordering::Relaxed);
        for (what, pending, step) in flying {
            pending.await.unwrap_or_else(|error| panic!("{what}: {error}"));
            match step {
                Step::Bytes(at, bytes) => {
                    model[at as usize..][..bytes.len()].copy_from_slice(&bytes);
                }
                Step::Trim(at, len) => {
                    let found = device.read(at, len as usize).await.unwrap();
                    model[at as usize..][..len as usize].copy_from_slice(found.bytes());
                }
            }
        }
        if rng.chance(15) {
            device.flush().await.unwrap();
        }
        let at = rng.below(size);
        let len = rng.between(1, (size - at).min(300_000));
        let found = device.read(at, len as usize).await.unwrap();
        let label = format!("{len} bytes at {at}");
        same(found.bytes(), &model[at as usize..(at + len) as usize], &label);
    }
}

/// Panics unless bytes are those of the model.
pub fn same(found: &[u8], wanted: &[u8], label: &str) {
    assert_eq!(found.len(), wanted.len(), "{label}");
    if found != wanted {
        let at = found.iter().zip(wanted).position(|(one, other)| one != other).unwrap();
        let count = found.iter().zip(wanted).filter(|(one, other)| one != other).count();
        let one = &found[at..];
        let other = &wanted[at..];
        let one = &one[..one.len().min(16)];
        let other = &other[..other.len().min(16)];
        panic!("{label}: {count} bytes differ, the first at {at}: {one:?}, not {other:?}");
    }
}

/// Plays on an image in several runs, each of which opens it again.
fn check(qemu: &Qemu, case: &Case, seed: u64, runs: u64) {
    let label = format!("{case:?}, seed {seed}");
    eprintln!("{label}");
    let mut rng = Rng::new(seed);
    make(qemu, &mut rng, case);
    let mut model = qemu.raw("top");
    let cache = if rng.chance(50) { "32M" } else { "4k" };
    let spec = qemu.spec("top", &format!("names=allow&cache={cache}"));
    for run in 0..runs {
        let seed = rng.number();
        let cluster = case.cluster;
        let played = write_with(&spec, move |device| async move {
            assert!(device.facts().can.contains(Can::WRITE | Can::ZERO | Can::TRIM | Can::FUA));
            let mut rng = Rng::new(seed);
            play(&device, &mut rng, &mut model, 12, cluster).await;
            same(&content(&device).await.unwrap(), &model, "before the end");
            if run == 0 {
                device.flush().await.unwrap();
            }
            model
        });
        model = played.unwrap_or_else(|error| panic!("{label}: {error}"));
        assert!(qemu.raw("top") == model, "{label}: qemu-img reads other bytes after run {run}");
        qemu.check("top", &label);
        if case.under == Under::RawDataFile {
            let raw = std::fs::read(qemu.file("data")).unwrap();
            assert!(raw[..model.len()] == model, "{label}: the raw data file");
        }
    }
}

#[test]
fn every_combination_is_written_as_the_model_says() {
    let Some(qemu) = Qemu::find() else { return };
    let seed = rng::seed();
    eprintln!("BLOCKHAUL_SEED={seed}");
    make_noise(&qemu, &mut Rng::new(seed));
    // A part of the combinations at a time.
    let (rounds, step) = if std::env::var_os("BLOCKHAUL_LONG").is_some() { (5, 1) } else { (1, 2) };
    let cases = cases();
    for round in 0..rounds {
        for (number, case) in cases.iter().enumerate().skip(seed as usize % step).step_by(step) {
            check(&qemu, case, seed.wrapping_add(round * 1000 + number as u64), 2);
        }
    }
    println!("{} requests", REQUESTS.load(Ordering::Relaxed));
}

#[test]
fn the_file_ends_behind_clusters_of_zeroes_of_which_only_the_first_was_used_before() {
    const CLUSTER: u64 = 64 << 10;
    let Some(qemu) = Qemu::find() else { return };
    qemu.create("top", "compat=1.1", 16 * CLUSTER);
    let spec = qemu.spec("top", "");
    let played = write_with(&spec, |device| async move {
        // The last cluster of the file becomes free.
        device.write(0, Data::copy_of(&[1; CLUSTER as usize])).await?;
        device.submit(Request::trim(0, CLUSTER)).await?;
        device.flush().await?;
        let keep = Request::zero(4 * CLUSTER, 2 * CLUSTER).with(RequestFlags::NO_HOLE);
        device.submit(keep).await
    });
    played.unwrap().unwrap();
    qemu.check("top", "two clusters of zeroes");
}
