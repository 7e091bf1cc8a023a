//! Random faults from a printed seed: no wrong bytes, and no hang.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use blockhaul_testkit::rng::{self, Rng};

use super::*;

fn fault(rng: &mut Rng, place: &str) -> Fault {
    let some = rng.below(60_000) as usize;
    match rng.below(14) {
        0 => Fault::Drop,
        1 => Fault::Delay(Duration::from_millis(rng.below(5))),
        2 => Fault::Cut(some),
        3 => Fault::Shorter(some + 1),
        4 => Fault::Status(*rng.pick(&[429, 500, 502, 503, 504]), String::new()),
        5 => Fault::Status(*rng.pick(&[301, 302, 307, 308]), format!("Location: {place}\r\n")),
        6 => Fault::Chunked,
        7 => Fault::Http10,
        8 => Fault::Close,
        9 => Fault::NoRanges,
        10 => Fault::Slow(20_000, Duration::from_millis(1)),
        11 => Fault::NoSize,
        12 => Fault::Endless,
        _ => Fault::Status(416, String::new()),
    }
}

/// One disk that is read with random faults; whether it was replaced meanwhile.
fn round(seed: u64) {
    let mut rng = Rng::new(seed);
    let size = 1 + rng.below(400_000) as usize;
    let number = rng.below(50);
    let served = ServedObject::new(content(number, size));
    let replaced_at = rng.chance(25).then(|| 1 + rng.below(12) as usize);
    let rng = Arc::new(Mutex::new(rng));
    let chosen = rng.clone();
    let server = ObjectServer::start(served, move |at, request, object| {
        let mut rng = chosen.lock().unwrap();
        if replaced_at == Some(at) {
            let mut object = object.lock().unwrap();
            object.bytes = content(number + 1, size).into();
            object.etag = Some("\"two\"".to_owned());
            object.modified = Some("Mon, 07 Nov 1994 08:49:37 GMT".to_owned());
        }
        if is_data(request) && rng.chance(40) { fault(&mut rng, "/other") } else { Fault::None }
    });
    let url = server.url("/disk#connections=4");
    let results = on_a_worker(move || async move {
        let stack = open(&url).await?;
        let mut found = Vec::new();
        for _ in 0..6 {
            let (at, len) = {
                let mut rng = rng.lock().unwrap();
                let at = rng.below(size as u64);
                (at, rng.between(1, 150_000.min(size as u64 - at)) as usize)
            };
            found.push((at, len, read(&stack, at, len).await));
        }
        Ok::<_, blockhaul_block::Error>(found)
    });
    for (at, len, bytes) in results.unwrap_or_else(|error| panic!("seed {seed:#x}: {error}")) {
        match bytes {
            Ok(bytes) => assert!(
                bytes == content(number, size)[at as usize..at as usize + len],
                "seed {seed:#x}: wrong bytes at offset {at}, length {len}"
            ),
            // Many faults in a row are an error, too.
            Err(error) => log::debug!("seed {seed:#x}: {error}"),
        }
    }
}

#[test]
fn random_faults_leave_no_wrong_bytes() {
    let rounds = if std::env::var_os("BLOCKHAUL_LONG").is_some() { 500 } else { 12 };
    let first = rng::seed() % (u64::MAX / 2);
    println!("BLOCKHAUL_SEED={first:#x}, {rounds} rounds");
    for seed in first..first + rounds {
        round(seed);
    }
}
