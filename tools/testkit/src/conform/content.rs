//! Sentences 6 and 7 of the contract: the results of reads, and the effects of writes, zeroes and
//! trims.

use std::ops::Range;

use blockhaul_block::{Can, Kind, Reply, Request, RequestFlags};
use blockhaul_io::Reservation;

use super::case::{CheckCase, WHOLE_MAX, read_bytes, same};
use super::verdict::{CheckResult, Verdict, ensure, skip_if};

/// The contents match the facts and the options, and are the same in pieces of any length.
pub(super) async fn the_content_is_as_told(case: CheckCase) -> CheckResult {
    skip_if!(case.reach() == 0, "the device is empty");
    for window in case.most() {
        // Piece by piece: two copies of everything would be a lot for many tests at a time.
        let mut at = window.start;
        while at < window.end {
            let end = window.end.min(at + case.up(1 << 20));
            let bytes = case.read(at..end).await?;
            if let Some(told) = case.initial_content(at..end) {
                same(at, &bytes, &told)?;
            }
            let odd = case.up(1000 + case.random(100_000)).min(case.chunk());
            let again = case.read_on(&case.device, at..end, odd).await?;
            same(at, &again, &bytes).map_err(|text| format!("in pieces of {odd} bytes: {text}"))?;
            at = end;
        }
    }
    Ok(Verdict::Held)
}

/// Ranges with odd starts, ends and lengths, as far as the minimum block allows, at both ends of
/// the device and around the borders of sectors, pages and larger blocks.
fn odd_ranges(case: &CheckCase) -> Vec<Range<u64>> {
    let minimum = case.minimum();
    let reach = case.reach();
    let mut ranges = Vec::new();
    let mut add = |at: u64, len: u64| {
        let at = at - at % minimum;
        let end = at.saturating_add(len.next_multiple_of(minimum)).min(reach);
        if at < end && end - at <= case.chunk() {
            ranges.push(at..end);
        }
    };
    for border in [512, 4096, 32 << 10, 64 << 10, 1 << 20] {
        for (before, len) in [(0, 1), (1, 1), (1, 2), (3, 509), (1, 4097), (0, border), (7, 10_001)]
        {
            add(border - before, len);
        }
    }
    for len in [1, 2, 511, 512, 513, 4095, 4096, 4097, 65_537] {
        add(0, len);
        add(1, len);
        add(reach.saturating_sub(len), len);
        add(reach.saturating_sub(len + 1), len);
    }
    ranges
}

/// 6. A read returns exactly the requested bytes, or `Hole` if all are zero.
pub(super) async fn a_read_answers_exactly_the_bytes_asked_for(case: CheckCase) -> CheckResult {
    skip_if!(case.reach() == 0, "the device is empty");
    let mut known = Vec::new();
    for window in case.windows() {
        if !case.keeps() {
            known.push((window.start, case.read(window).await?));
            continue;
        }
        // Visible contents: noise with zeroes between.
        let mut bytes = case.noise(window.end - window.start);
        for chunk in bytes.chunks_mut(8192).skip(1).step_by(3) {
            chunk.fill(0);
        }
        case.write(window.start, &bytes).await?;
        known.push((window.start, bytes));
    }
    let mut looked = 0;
    for range in odd_ranges(&case) {
        let within = known.iter().find(|(start, bytes)| {
            *start <= range.start && range.end <= start + bytes.len() as u64
        });
        let Some((start, bytes)) = within else { continue };
        let len = (range.end - range.start) as usize;
        let expected = &bytes[(range.start - start) as usize..][..len];
        let reply = case.ok(Request::read(range.start, Reservation::unpooled(len))).await?;
        let hole = matches!(reply, Reply::Hole);
        let found = read_bytes(reply, len)?;
        let kind = if hole { "a hole for data" } else { "wrong bytes" };
        same(range.start, &found, expected)
            .map_err(|text| format!("read {}+{len}: {kind}: {text}", range.start))?;
        looked += 1;
    }
    ensure!(looked > 0, "no range could be looked at");
    Ok(Verdict::Held)
}

/// A device with noise in its windows, and that noise.
async fn with_noise(case: &CheckCase) -> Result<Vec<(u64, Vec<u8>)>, String> {
    let mut known = Vec::new();
    for window in case.windows() {
        let noise = case.noise(window.end - window.start);
        case.write(window.start, &noise).await?;
        known.push((window.start, noise));
    }
    Ok(known)
}

/// The part of the known bytes for a range, if it is known.
fn slice(known: &mut [(u64, Vec<u8>)], range: Range<u64>) -> Option<&mut [u8]> {
    known.iter_mut().find_map(|(start, bytes)| {
        let from = usize::try_from(range.start.checked_sub(*start)?).ok()?;
        bytes.get_mut(from..from.checked_add((range.end - range.start) as usize)?)
    })
}

/// Checks that all windows have their known contents.
async fn unchanged(case: &CheckCase, known: &[(u64, Vec<u8>)], after: &str) -> Result<(), String> {
    for (start, bytes) in known {
        let found = case.read(*start..*start + bytes.len() as u64).await?;
        same(*start, &found, bytes).map_err(|text| format!("{after}: {text}"))?;
    }
    Ok(())
}

/// 6. A write changes its range and nothing else, wherever it starts and ends.
pub(super) async fn a_write_changes_its_range_and_nothing_else(case: CheckCase) -> CheckResult {
    skip_if!(!case.keeps(), "the device does not keep writes");
    skip_if!(case.reach() == 0, "the device is empty");
    let mut known = with_noise(&case).await?;
    for (index, range) in odd_ranges(&case).into_iter().enumerate() {
        let bytes = case.noise(range.end - range.start);
        let Some(place) = slice(&mut known, range.clone()) else { continue };
        place.copy_from_slice(&bytes);
        case.write(range.start, &bytes).await?;
        let around = range.start.saturating_sub(case.up(5000))..range.end + case.up(5000);
        let around = around.start..around.end.min(case.reach());
        if let Some(expected) = slice(&mut known, around.clone()) {
            let found = case.read(around.clone()).await?;
            same(around.start, &found, expected).map_err(|text| {
                format!("after write {}+{}: {text}", range.start, range.end - range.start)
            })?;
        }
        if index % 16 == 0 {
            unchanged(&case, &known, "after some writes").await?;
        }
    }
    unchanged(&case, &known, "after all writes").await?;
    Ok(Verdict::Held)
}

// nbd: zeroes.read-back
/// 7. Zero makes the range read as zeroes, with and without each flag, and may be longer than the
///    longest write.
pub(super) async fn zero_makes_the_range_read_as_zeroes(case: CheckCase) -> CheckResult {
    skip_if!(!case.can(Can::WRITE | Can::ZERO), "the device has no zero");
    skip_if!(case.reach() == 0, "the device is empty");
    let mut flags = vec![RequestFlags::empty(), RequestFlags::NO_HOLE];
    if case.can(Can::FUA) {
        flags.push(RequestFlags::FUA);
        flags.push(RequestFlags::FUA | RequestFlags::NO_HOLE);
    }
    if !case.keeps() {
        for flags in flags {
            case.ok(Request::zero(0, case.minimum()).with(flags)).await?;
        }
        return Ok(Verdict::Held);
    }
    let mut known = with_noise(&case).await?;
    for (index, range) in odd_ranges(&case).into_iter().enumerate() {
        let len = range.end - range.start;
        let Some(place) = slice(&mut known, range.clone()) else { continue };
        place.fill(0);
        let flags = flags[index % flags.len()];
        case.ok(Request::zero(range.start, len).with(flags)).await?;
        let around = range.start.saturating_sub(case.up(5000))..range.end + case.up(5000);
        let around = around.start..around.end.min(case.reach());
        if let Some(expected) = slice(&mut known, around.clone()) {
            let found = case.read(around.clone()).await?;
            same(around.start, &found, expected)
                .map_err(|text| format!("after zero {}+{len} {flags:?}: {text}", range.start))?;
        }
        if index % 3 == 0 {
            // Noise again, so that the next zero request has an effect.
            let noise = case.noise(len);
            case.write(range.start, &noise).await?;
            slice(&mut known, range).ok_or("known above")?.copy_from_slice(&noise);
        }
    }
    unchanged(&case, &known, "after all zeroes").await?;
    if case.reach() <= WHOLE_MAX {
        let noise = case.noise(case.minimum());
        case.write(case.reach() - case.minimum(), &noise).await?;
        case.ok(Request::zero(0, case.reach())).await?;
        for (start, bytes) in &mut known {
            bytes.fill(0);
            let found = case.read(*start..*start + bytes.len() as u64).await?;
            same(*start, &found, bytes).map_err(|text| format!("after zero of all: {text}"))?;
        }
    }
    Ok(Verdict::Held)
}

/// 7. With FAST it works or fails as unsupported.
pub(super) async fn fast_zero_works_or_is_unsupported(case: CheckCase) -> CheckResult {
    skip_if!(!case.can(Can::WRITE | Can::ZERO | Can::FAST_ZERO), "the device has no fast zero");
    for (index, place) in case.places(8, 8192).into_iter().enumerate() {
        let len = place.end - place.start;
        if case.keeps() {
            case.write(place.start, &case.noise(len)).await?;
        }
        let mut flags = RequestFlags::FAST;
        if index % 2 == 1 {
            flags |= RequestFlags::NO_HOLE;
        }
        let pending = case.device.submit(Request::zero(place.start, len).with(flags));
        match case.wait(pending, "a fast zero").await? {
            Ok(_) if case.keeps() => {
                let found = case.read(place.clone()).await?;
                same(place.start, &found, &vec![0; len as usize])?;
            }
            Ok(_) => {}
            Err(error) => {
                let kind = error.kind();
                ensure!(kind == Kind::Unsupported, "a fast zero failed as {kind:?}: {error}");
            }
        }
    }
    Ok(Verdict::Held)
}

/// 7. Trim may do nothing and leaves its range undefined, but nothing else; later writes are
///    visible.
pub(super) async fn trim_leaves_its_neighbours_alone(case: CheckCase) -> CheckResult {
    skip_if!(!case.can(Can::WRITE | Can::TRIM), "the device has no trim");
    skip_if!(case.reach() == 0, "the device is empty");
    if !case.keeps() {
        case.ok(Request::trim(0, case.minimum())).await?;
        return Ok(Verdict::Held);
    }
    let mut known = with_noise(&case).await?;
    for range in odd_ranges(&case) {
        let len = range.end - range.start;
        if slice(&mut known, range.clone()).is_none() {
            continue;
        }
        case.ok(Request::trim(range.start, len)).await?;
        let around = range.start.saturating_sub(case.up(5000))..range.end + case.up(5000);
        let around = around.start..around.end.min(case.reach());
        if let Some(expected) = slice(&mut known, around.clone()) {
            let mut found = case.read(around.clone()).await?;
            let from = range.start - around.start;
            let to = range.end - around.start;
            let trimmed = from as usize..to as usize;
            found[trimmed.clone()].copy_from_slice(&expected[trimmed]);
            same(around.start, &found, expected)
                .map_err(|text| format!("beside trim {}+{len}: {text}", range.start))?;
        }
        let noise = case.noise(len);
        case.write(range.start, &noise).await?;
        slice(&mut known, range).ok_or("known above")?.copy_from_slice(&noise);
    }
    unchanged(&case, &known, "after all trims were written again").await?;
    Ok(Verdict::Held)
}
