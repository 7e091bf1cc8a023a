//! Verification, comparison and digests.

use std::sync::Arc;

use blockhaul_block::{DeviceExt, Kind, OpKind};
use blockhaul_engine::{CopyProgress, EngineOptions, SEGMENT, Side, verify};
use blockhaul_io::Pool;
use blockhaul_testkit::fault::{FaultDevice, FaultEffect, FaultRule};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};
use blockhaul_testkit::rng::{Rng, seed};

use super::{content, on_worker, source_of, stack};

#[test]
fn verification_finds_the_first_difference() {
    on_worker(|| async {
        let size = (SEGMENT + (3 << 20)) as usize;
        let mut bytes = vec![0; size];
        bytes[..5 << 20].fill(3);
        let target = source_of(&bytes, false);
        let source = stack(source_of(&bytes, true));
        let options = EngineOptions::default();
        let pool = Pool::new(16 << 20);
        let check = || async {
            let progress = Arc::new(CopyProgress::new());
            verify(&source, &stack(target.clone()), &options, &pool, &progress).await
        };
        let same = check().await.unwrap();
        assert_eq!(same.bytes, size as u64);
        assert_eq!(same.digest.as_ref().unwrap().len(), 64);
        let manifest = |device: Arc<ModelDevice>| async move {
            let options = EngineOptions::default();
            let pool = Pool::new(16 << 20);
            let progress = Arc::new(CopyProgress::new());
            blockhaul_engine::manifest(&stack(device), None, &options, &pool, &progress)
                .await
                .unwrap()
        };
        let kept = manifest(target.clone()).await;
        assert_eq!((kept.size(), Some(kept.digest())), (size as u64, same.digest));
        target.model().bytes_mut()[size - 1] ^= 1;
        let changed = manifest(target.clone()).await;
        assert_eq!(kept.differences(&changed), [(SEGMENT + (2 << 20), 1 << 20)]);
        let error = check().await.unwrap_err();
        assert!(error.to_string().contains(&format!("offset {}", size - 1)), "{error}");
        target.model().bytes_mut()[12_345] ^= 1;
        let error = check().await.unwrap_err();
        assert!(error.to_string().contains("offset 12345"), "{error}");
    });
}

#[test]
fn a_comparison_finds_the_first_difference_wherever_it_is() {
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let options = EngineOptions::default();
        let pool = Pool::new(4 << 20);
        for round in 0..60 {
            let size = rng.between(1, 2 << 20) as usize;
            let bytes = content(&mut rng, size);
            let mut changed = bytes.clone();
            // One may be longer: zeroes there make no difference.
            changed.resize(size + rng.below(300_000) as usize, 0);
            let mut expected = None;
            for _ in 0..rng.below(3) {
                let at = rng.below(changed.len() as u64) as usize;
                changed[at] ^= 0x40;
            }
            for (at, byte) in changed.iter().enumerate() {
                if *byte != bytes.get(at).copied().unwrap_or(0) {
                    expected = Some(at as u64);
                    break;
                }
            }
            let sizes = (size as u64, changed.len() as u64);
            // Like memory, which reports its holes: written only where there is data.
            let mut ends = Vec::new();
            for bytes in [&bytes, &changed] {
                let model = Model::new(bytes.len() as u64);
                let device = ModelDevice::new(model, CompletionOrder::Shuffled(rng.number()));
                for (start, block) in bytes.chunks(4096).enumerate() {
                    if !blockhaul_io::is_zero(block) {
                        let data = blockhaul_io::Data::copy_of(block);
                        device.write(start as u64 * 4096, data).await.unwrap();
                    }
                }
                ends.push((device.clone(), stack(device)));
            }
            let flipped = rng.chance(50);
            let (one, other) = if flipped { (1, 0) } else { (0, 1) };
            let progress = Arc::new(CopyProgress::new());
            let found =
                blockhaul_engine::compare(&ends[one].1, &ends[other].1, &options, &pool, &progress)
                    .await;
            let found = found.unwrap();
            assert_eq!(found.differs_at, expected, "seed {seed}, round {round}");
            assert_eq!(found.sizes, if flipped { (sizes.1, sizes.0) } else { sizes });
            let read = |device: &Arc<ModelDevice>| {
                let reads = device.seen().into_iter().filter(|seen| seen.kind == OpKind::Read);
                reads.map(|seen| seen.len).sum::<u64>()
            };
            let filled = bytes.chunks(4096).filter(|block| !blockhaul_io::is_zero(block)).count();
            assert!(read(&ends[0].0) <= filled as u64 * 4096, "holes are not read");
            assert_eq!(pool.reserved(), 0);
        }
    });
}

#[test]
fn digests_are_those_of_the_bytes_and_holes_are_not_read() {
    use blockhaul_engine::DigestAlgorithm;
    let seed = seed();
    on_worker(move || async move {
        let mut rng = Rng::new(seed);
        let options = EngineOptions {
            retries: 3,
            retry_delay: Default::default(),
            ..EngineOptions::default()
        };
        for round in 0..30 {
            let size = rng.between(0, 3 << 20) as usize;
            let mut bytes = content(&mut rng, size);
            if size > 2 << 20 {
                bytes[600_000..1_900_000].fill(0);
            }
            let device =
                ModelDevice::new(Model::new(size as u64), CompletionOrder::Shuffled(rng.number()));
            for (start, block) in bytes.chunks(4096).enumerate() {
                if !blockhaul_io::is_zero(block) {
                    let data = blockhaul_io::Data::copy_of(block);
                    device.write(start as u64 * 4096, data).await.unwrap();
                }
            }
            let faults = FaultDevice::over(device.clone(), rng.number());
            faults.add(
                FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(OpKind::Read).percent(10).times(3),
            );
            let source = stack(faults);
            let pool = Pool::new(rng.between(1, 8) * (256 << 10));
            let progress = Arc::new(CopyProgress::new());
            let found = blockhaul_engine::digest(
                &source,
                DigestAlgorithm::Blake3,
                &options,
                &pool,
                &progress,
            )
            .await;
            let told = format!("seed {seed}, round {round}, {size} bytes");
            assert_eq!(found.unwrap(), blake3::hash(&bytes).to_hex().as_str(), "{told}");
            if size > 2 << 20 {
                let whole_piece = |seen: &blockhaul_testkit::model::RequestRecord| {
                    seen.kind == OpKind::Read && seen.at >= 3 << 18 && seen.at < 7 << 18
                };
                assert!(!device.seen().iter().any(whole_piece), "{told}");
            }
            assert_eq!(pool.reserved(), 0);
        }
    });
}

#[test]
fn a_comparison_tells_what_could_not_be_done() {
    on_worker(|| async {
        let bytes = vec![7; 3 << 20];
        let options = EngineOptions::default();
        let pool = Pool::new(4 << 20);
        for kind in [OpKind::Read, OpKind::Extents] {
            let bad = FaultDevice::over(source_of(&bytes, false), 1);
            bad.add(FaultRule::new(FaultEffect::Fail(Kind::Io)).kind(kind).times(1));
            let one = stack(source_of(&bytes, false));
            let other = stack(bad.clone());
            let progress = Arc::new(CopyProgress::new());
            let error = blockhaul_engine::compare(&one, &other, &options, &pool, &progress)
                .await
                .unwrap_err();
            assert_eq!(error.error.request().unwrap().0, kind);
            assert_eq!(error.side, Some(Side::Target));
            assert_eq!((bad.in_flight(), pool.reserved()), (0, 0), "drained");
        }
    });
}
