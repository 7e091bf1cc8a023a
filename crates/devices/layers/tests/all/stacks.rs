//! Random stacks of layers fulfil the contract of devices: two to six of them with random options,
//! over storages with different kinds of contents.
//!
//! A few always, many with `BLOCKHAUL_LONG`. A failure names the stack; `BLOCKHAUL_SEED` repeats
//! it.

use std::ffi::OsStr;

use blockhaul_block::{Kind, Result};
use blockhaul_catalog::{DeviceSpec, Intent, Registry, Stack};
use blockhaul_io::{Runtime, RuntimeConfig};
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent};
use blockhaul_testkit::rng::{self, Rng};

/// Storages, and whether they are zero.
const DEVICES: &[(&str, bool)] = &[
    ("memory:2M", true),
    ("memory:2000003", true),
    ("memory:1048064", true),
    ("zero:1000001", true),
    ("pattern:2M", false),
    ("sample:3M", false),
    ("data:0x55*100000 @300000 \"abc\"*70000?size=2000k", false),
];

/// Layers that change only the size, the byte order, and the reported facts.
const LAYERS: &[&str] = &[
    "allocation-depth",
    "blocksize?minblock=4k",
    "blocksize?minblock=512&maxdata=4k&maxlen=64k",
    "blocksize?minimum=512&preferred=4k&maximum=64k",
    "cache",
    "cache?cache-on-read=true&cache-min-block-size=4k",
    "cache?cache=writethrough&cache-on-read=true",
    "cache?cache=unsafe&cache-min-block-size=128k",
    "cache?cache-on-read=true&cache-min-block-size=4k&cache-max-size=64k",
    "cow",
    "cow?cow-block-size=4k",
    "cow?cow-block-size=1M",
    "delay?extents=1ms&exclusive=on",
    "error?all=0%",
    "evil?evil-probability=0",
    "extents-cache",
    "extents-cache?memory=1k&bulk=64k",
    "fua",
    "fua?fuamode=emulate",
    "fua?fuamode=force",
    "fua?fuamode=pass",
    "fua?fuamode=discard",
    "log?file=/dev/null",
    "multi-conn",
    "multi-conn?mode=emulate&track-dirty=off",
    "multi-conn?mode=disable",
    "nocache",
    "nocache?cachemode=emulate",
    "nocache?cachemode=nop",
    "noextents",
    "nozero",
    "nozero?zeromode=emulate",
    "nozero?zeromode=notrim&fastzeromode=ignore",
    "nozero?zeromode=plugin&fastzeromode=slow",
    "offset?offset=511",
    "offset?offset=64k&range=700001",
    "pause",
    "protect?protect=9M-",
    "rate?rate=2G&burst=4k",
    "readahead",
    "readahead?window=1M",
    "readonly",
    "retry",
    "retry-request",
    "scan?scan-size=64k",
    "stats?file=/dev/null",
    "swab",
    "swab?swab-bits=32",
    "swab?swab-bits=64",
    "throttle?bps-read=2G&iops-total=1000000",
    "truncate?truncate=600001",
    "truncate?round-down=4k",
];

fn random(rng: &mut Rng) -> (&'static str, InitialContent, Vec<&'static str>) {
    let (device, zeroes) = *rng.pick(DEVICES);
    let content = if zeroes { InitialContent::Zeroes } else { InitialContent::Any };
    let count = rng.between(2, 4);
    let mut layers: Vec<_> = (0..count).map(|_| *rng.pick(LAYERS)).collect();
    if rng.chance(25) {
        // Occasional failures are retried, whatever is below and above. Flushes and durable writes
        // are not retried: they do not fail, and durable data is written, then flushed.
        let place = rng.below(layers.len() as u64 + 1) as usize;
        let flaky = [
            "error?read=3%&write=3%&zero=3%&trim=3%&extents=3%&cache=3%",
            "retry-request?retries=100&delay=0",
            "fua?fuamode=emulate",
        ];
        layers.splice(place..place, flaky);
    }
    (device, content, layers)
}

async fn open(device: &str, layers: &[&str]) -> Result<Stack> {
    let registry = Registry {
        backends: crate::common::backends(),
        layers: crate::common::kinds(),
        ..Registry::default()
    };
    let layers = layers.iter().map(|text| registry.layer(text)).collect::<Result<_>>()?;
    registry.open(&DeviceSpec::parse(OsStr::new(device))?, layers, Intent::WRITE).await
}

/// The size of the stack; `None`: the layers do not go together, and say so.
fn size(device: &'static str, layers: &[&'static str]) -> Option<u64> {
    let layers = layers.to_vec();
    let runtime =
        Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap();
    let opened = async move || open(device, &layers).await.map(|stack| stack.device().facts().size);
    match runtime.block_on(opened) {
        Ok(size) => Some(size),
        Err(error) => {
            assert!(matches!(error.kind(), Kind::Usage | Kind::Unsupported), "{device}: {error}");
            None
        }
    }
}

/// Whether these go together, and each byte can be written: a larger `truncate` has an end that takes zeroes
/// only.
fn fit(device: &'static str, layers: &[&'static str]) -> bool {
    let grows = |index: usize| {
        let before = size(device, &layers[..index]);
        before < size(device, &layers[..=index])
    };
    let mut cuts = (0..layers.len()).filter(|&index| layers[index].starts_with("truncate"));
    size(device, layers).is_some() && !cuts.any(grows)
}

#[test]
fn layers_over_layers_keep_the_contract() {
    let seed = rng::seed();
    let rng = &mut Rng::new(seed);
    let long = std::env::var_os("BLOCKHAUL_LONG").is_some();
    let mut wrong = String::new();
    for _ in 0..if long { 100 } else { 6 } {
        let (device, content, layers) = random(rng);
        if !fit(device, &layers) {
            continue;
        }
        let options =
            ConformOptions { rounds: 2, steps: 60, seed: Some(seed), ..ConformOptions::default() };
        let name = format!(
            "{} over {device}",
            layers.iter().rev().copied().collect::<Vec<_>>().join(" over ")
        );
        let report = conform::run(&name, options.content(content), move || {
            let layers = layers.clone();
            async move { open(device, &layers).await }
        });
        for (engine, check, failure) in report.failures() {
            let failure = format!("\n{name}: {check} ({engine:?}): {failure}");
            // A long run may be aborted.
            eprintln!("BLOCKHAUL_SEED={seed:#x}:{failure}");
            wrong += &failure;
        }
    }
    assert!(wrong.is_empty(), "BLOCKHAUL_SEED={seed:#x}:{wrong}");
}
