//! Every layer fulfils the contract of devices, on every engine, and so does the device below.

use std::ffi::OsStr;
use std::time::Duration;

use blockhaul_block::{Can, Facts};
use blockhaul_catalog::{DeviceSpec, Intent, LayerBase, Registry};
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};
use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

/// Puts layers over a device, the last one outermost, and runs the suite.
fn check(device: &'static str, layers: &'static [&'static str], options: ConformOptions) {
    let name = format!("{} over {device}", layers.join(" over "));
    conform::check(&name, options, move || async move {
        let registry = Registry {
            backends: crate::common::backends(),
            layers: crate::common::kinds(),
            path: blockhaul_backends::PATH_SCHEME,
            ..Registry::default()
        };
        let configured =
            layers.iter().map(|text| registry.layer(text)).collect::<Result<_, _>>()?;
        registry.open(&DeviceSpec::parse(OsStr::new(device))?, configured, Intent::WRITE).await
    });
}

fn zeroes() -> ConformOptions {
    ConformOptions::default().content(InitialContent::Zeroes)
}

#[test]
fn offset() {
    check("memory:9M", &["offset?offset=4097&range=5000001"], zeroes());
    let shifted = |at: u64| ((at + 4099) & !7).to_be_bytes()[((at + 4099) % 8) as usize];
    let options = ConformOptions::default().content(InitialContent::oracle(shifted));
    check("pattern:9M", &["offset?offset=4099"], options);
    // It ends within a block of a device that refuses parts of blocks.
    let layers = &["blocksize?minimum=4k&error-policy=error", "offset?range=300001"];
    check("memory:1M", layers, short(zeroes()));
}

#[test]
fn allocation_depth() {
    check("memory:5M", &["allocation-depth"], zeroes());
    check("pattern:2M", &["noextents", "allocation-depth"], short(ConformOptions::default()));
}

#[test]
fn contexts() {
    check("memory:5M", &["allocation-depth", "contexts"], zeroes());
    let both = &["allocation-depth", "contexts?show=qemu:allocation-depth"];
    check("pattern:2M", both, short(ConformOptions::default()));
    check("pattern:2M", &["noextents", "contexts"], short(ConformOptions::default()));
}

#[test]
fn detect_zeroes() {
    check("memory:5M", &["detect-zeroes"], zeroes());
    check("memory:2M", &["detect-zeroes?unmap=on"], short(zeroes()));
    check("memory:2M", &["nozero", "detect-zeroes"], short(zeroes()));
}

#[test]
fn readonly() {
    check("memory:5M", &["readonly"], zeroes());
}

#[test]
fn delay() {
    let latency = Duration::from_millis(10);
    let options = ConformOptions { latency: Some(latency), rounds: 1, steps: 40, ..zeroes() };
    let all =
        &["delay?read=10ms&write=10ms&zero=10ms&trim=10ms&flush=10ms&cache=10ms&extents=10ms"];
    check("memory:1M", all, options);
    check("memory:1M", &["delay?extents=1ms&exclusive=on"], zeroes());
}

#[test]
fn rate() {
    check("memory:2M", &["rate?rate=400M&burst=64k"], zeroes());
}

#[test]
fn throttle() {
    let both = &["throttle?bps-total=400M&bps-total-max=64k", "throttle?iops-write=100000"];
    check("memory:2M", both, zeroes());
}

#[test]
fn error_that_never_comes() {
    check("memory:5M", &["error?all=0%", "error?at=6M"], zeroes());
}

#[test]
fn log_and_stats() {
    check("memory:1M", &["log?file=/dev/null", "stats?file=/dev/null"], zeroes());
}

#[test]
fn extents_cache() {
    check("memory:9M", &["extents-cache"], zeroes());
    // Hardly any memory: everything is dropped all the time.
    check("memory:9M", &["extents-cache?memory=1k&bulk=64k", "delay?extents=1ms"], zeroes());
    check("memory:5M", &["delay?extents=1ms&write=1ms", "extents-cache"], zeroes());
    check("sample:5M", &["extents-cache?bulk=1M"], ConformOptions::default());
}

/// Fewer random requests, for layers that change little.
fn short(options: ConformOptions) -> ConformOptions {
    ConformOptions { rounds: 2, steps: 60, ..options }
}

#[test]
fn evil() {
    // It is correct without errors; errors have separate tests.
    check("memory:2M", &["evil?evil-probability=0"], short(zeroes()));
    // The same bits are stuck on every read.
    const STUCK: &str = "evil?evil-probability=1e-4&evil-seed=5";
    check("pattern:2M", &[STUCK], short(ConformOptions::default()));
}

#[test]
fn blocksize() {
    check("memory:2M", &["blocksize?minimum=4k&maximum=64k&preferred=32k"], short(zeroes()));
    check("memory:2M", &["blocksize?minblock=4k&maxdata=8k&maxlen=64k"], short(zeroes()));
    let unaligned = ConformOptions { only: vec!["submit_never_blocks"], ..zeroes() };
    check("memory:2M", &["blocksize?minimum=1&maximum=32M&error-policy=error"], unaligned);
}

#[test]
fn checkwrite() {
    // Its replies depend on the data, which has a separate test. Here it only reads.
    check("pattern:2M", &["checkwrite", "readonly"], short(ConformOptions::default()));
}

#[test]
fn cow() {
    check("memory:9000001", &["cow?cow-block-size=4k"], zeroes());
    check("sample:5M", &["readonly", "cow"], ConformOptions::default());
    check("pattern:2000003", &["delay?read=1ms", "cow"], short(ConformOptions::default()));
}

#[test]
fn cache() {
    check("memory:9000001", &["cache?cache-min-block-size=4k"], short(zeroes()));
    check("memory:2M", &["cache?cache=writethrough&cache-on-read=true"], short(zeroes()));
    check("memory:2M", &["cache?cache=unsafe", "delay?write=1ms"], short(zeroes()));
    check(
        "pattern:2000003",
        &["delay?read=1ms", "cache?cache-on-read=on"],
        short(ConformOptions::default()),
    );
    check("sample:5M", &["readonly", "cache?cache-on-read=1"], short(ConformOptions::default()));
    // Hardly any space: blocks are cached and evicted all the time.
    const SMALL: &str = "cache?cache-on-read=true&cache-min-block-size=4k&cache-max-size=64k";
    check("memory:2M", &[SMALL], short(zeroes()));
    check("memory:2M", &["delay?write=1ms&zero=1ms", SMALL], short(zeroes()));
    check(
        "memory:5M",
        &["delay?read=1ms&write=1ms", "cache", "stats?file=/dev/null"],
        short(zeroes()),
    );
}

#[test]
fn extentlist() {
    // No list fits random writes: a read-only device of data, and a list that says so.
    const LIST: &str =
        concat!("extentlist?extentlist=", env!("CARGO_MANIFEST_DIR"), "/tests/all-data.txt");
    check("pattern:2M", &[LIST], short(ConformOptions::default()));
}

#[test]
fn masks() {
    check("memory:2M", &["noextents", "nocache"], short(zeroes()));
    check("memory:2M", &["nozero", "nocache?cachemode=emulate"], short(zeroes()));
    check("memory:2M", &["nozero?zeromode=emulate", "nocache?cachemode=nop"], short(zeroes()));
    check("memory:2M", &["nozero?zeromode=notrim&fastzeromode=ignore"], short(zeroes()));
    check("memory:2M", &["nozero?zeromode=plugin&fastzeromode=slow"], short(zeroes()));
}

#[test]
fn fua_and_multi_conn() {
    const MODES: [&[&str]; 8] = [
        &["fua"],
        &["fua?fuamode=emulate"],
        &["fua?fuamode=native"],
        &["fua?fuamode=force"],
        &["fua?fuamode=discard"],
        &["multi-conn?mode=emulate"],
        &["multi-conn?mode=disable"],
        &["multi-conn?mode=emulate&track-dirty=off"],
    ];
    for mode in MODES {
        check("memory:2M", mode, short(zeroes()));
    }
}

#[test]
fn partition() {
    // The table: partition 1, 9000 sectors from sector 63 on.
    let disk = "data:@446 0*4 0x83 0*3 63 0*3 0x28 0x23 0 0 @510 0x55 0xaa?size=5M";
    check(disk, &["partition?partition=1"], zeroes());
}

#[test]
fn protect() {
    check("memory:5M", &["protect?protect=6M-"], short(zeroes()));
    check("pattern:2M", &["protect?protect=0-"], short(ConformOptions::default()));
}

#[test]
fn readahead() {
    check("memory:5M", &["readahead", "readahead?window=1M"], short(zeroes()));
}

#[test]
fn retry() {
    check("memory:2M", &["retry", "retry-request"], short(zeroes()));
    // One request in ten fails, and is retried until it succeeds. Flushes and durable writes are
    // not retried.
    let flaky = &[
        "error?read=10%&write=10%&zero=10%&trim=10%&extents=10%&cache=10%",
        "retry-request?retries=100&delay=0",
        "retry?unflushed=fail",
        "fua?fuamode=emulate",
    ];
    check("memory:2M", flaky, short(zeroes()));
}

#[test]
fn scan() {
    check("memory:2M", &["scan?scan-size=64k&scan-forever=on"], short(zeroes()));
}

#[test]
fn pause() {
    conform::check("pause over memory", short(zeroes()), || async {
        let dir = tempfile::tempdir().expect("a folder for the socket");
        let layer = format!("pause?pause-control={}", dir.path().join("s").display());
        let registry = Registry { layers: crate::common::kinds(), ..Registry::default() };
        let device = registry.layer(&layer)?.wrap(blockhaul_backends::memory(2 << 20))?;
        Ok(conform::Subject::new(device).keep(dir))
    });
}

#[test]
fn swab() {
    check("memory:2M", &["swab"], zeroes());
    check("memory:2097149", &["swab?swab-bits=64"], short(zeroes()));
    check(
        "sample:2M",
        &["offset?offset=511", "swab?swab-bits=64"],
        short(ConformOptions::default()),
    );
}

/// Each keeps the memory of a read for its retry: those that hold the rest of the pool wait for it.
#[test]
fn repetitions_do_not_wait_for_memory() {
    const RETRY: &str = "retry?retries=100&retry-delay=0";
    const REQUEST: &str = "retry-request?retries=100&delay=0";
    const STACKS: [&[&str]; 3] = [
        &["error?read=30%", RETRY, "delay?extents=1ms&exclusive=on"],
        &["error?read=30%", REQUEST, "delay?extents=1ms&exclusive=on"],
        // Both keep it.
        &["error?read=30%", REQUEST, RETRY],
    ];
    for layers in STACKS {
        let only = vec!["a_pool_of_one_request_is_enough"];
        check("pattern:2M", layers, ConformOptions { only, ..ConformOptions::default() });
    }
}

#[test]
fn truncate() {
    check("memory:2M", &["truncate?truncate=1000001"], short(zeroes()));
    check("zero:1000001", &["readonly", "truncate?round-up=1M"], short(zeroes()));
    let both = &["readonly", "truncate?truncate=3M&round-down=1000"];
    check("zero:1000001", both, short(zeroes()));
}

#[test]
fn all_at_once() {
    let layers = &[
        "offset?offset=1M&range=3M",
        "stats?file=/dev/null",
        "rate?rate=1G",
        "delay?write=1ms",
        "error?all=0%",
        "log?file=/dev/null",
    ];
    check("memory:5M", layers, zeroes());
}

/// The hints of a device, by one letter each.
fn hints(facts: &Facts) -> String {
    let given = [
        (facts.zeroed, 'z'),
        (facts.takes_parked, 'p'),
        (facts.claims_room, 'c'),
        (facts.flush_failures_stay, 'f'),
        (facts.in_flight.is_some(), 'i'),
        (facts.can.contains(Can::EXTENTS) && !facts.emulated.contains(Can::EXTENTS), 'e'),
    ];
    given.iter().filter(|(given, _)| *given).map(|(_, letter)| letter).collect()
}

/// Layers, and the hints that they keep over a device that gives all of them.
const HINTS: &[(&str, &str)] = &[
    ("allocation-depth", "zpcfie"),
    ("blocksize?minimum=4k&maximum=64k", "zpcfie"),
    ("blocksize?minblock=4k", "zpfie"),
    ("blocksize?maxdata=64k", "zpfie"),
    ("blocksize?maxlen=64k", "zpfie"),
    ("cache", "zie"),
    ("cache?cache=writethrough", "zie"),
    ("checkwrite", "zcie"),
    ("contexts", "zpcfie"),
    ("cow", "zie"),
    ("delay?read=1ms", "zpcfie"),
    ("detect-zeroes", "zcfie"),
    ("error?at=2M", "zpcfie"),
    ("evil?evil-probability=0", "pfe"),
    ("extentlist?extentlist=/dev/null", "zpcfie"),
    ("extents-cache", "zpcfie"),
    ("fua", "zpcfie"),
    ("fua?fuamode=emulate", "zpcfie"),
    ("fua?fuamode=force", "zpcfie"),
    ("fua?fuamode=discard", "zpcfie"),
    ("log?file=/dev/null", "zpcfie"),
    ("multi-conn?mode=emulate", "zpcfie"),
    ("multi-conn?mode=disable", "zpcfie"),
    ("nocache", "zpcfie"),
    ("nocache?cachemode=emulate", "zpcfie"),
    ("noextents", "zpcfi"),
    ("nozero", "zpcfie"),
    ("nozero?zeromode=notrim", "zpcfie"),
    ("offset?offset=4096", "zpcfie"),
    ("pause", "zpcfie"),
    ("protect?protect=2M-", "zpcfie"),
    ("rate?rate=1G", "zpcfie"),
    ("readahead", "zpcfie"),
    ("readonly", "zpcfie"),
    ("retry", "zcie"),
    ("retry-request", "zcfie"),
    ("rotational", "zpcfie"),
    ("scan", "zpcfie"),
    ("stats?file=/dev/null", "zpcfie"),
    ("swab", "zcfie"),
    ("throttle?bps-total=1G", "zpcfie"),
    ("truncate?truncate=1000001", "zpcfie"),
    ("truncate?truncate=3000000", "zpcfie"),
];

/// Layers that have no zeroed device below, or are none.
const WITHOUT_HINTS: &[&str] = &[
    // They handle clients.
    "exitlast",
    "exitwhen",
    "exportname",
    "ip",
    "limit",
    "tls-fallback",
    // They show decoded contents, with their own facts.
    "gz",
    "luks",
    "xz",
    // They find the position for `offset` in the device's contents.
    "partition",
    "tar",
];

#[test]
fn layers_honour_the_hints_that_they_keep() {
    for kind in crate::common::kinds() {
        let tested = HINTS.iter().any(|(text, _)| text.split('?').next() == Some(kind.name));
        let none = WITHOUT_HINTS.contains(&kind.name);
        assert!(tested != none, "which hints does {} keep?", kind.name);
    }
    for &(text, kept) in HINTS {
        let only = vec![
            "the_facts_are_consistent",
            "a_zeroed_device_reads_as_zeroes",
            "late_room_has_its_memory_with_the_answer",
            "a_parked_payload_is_written_unseen",
            "every_context_is_answered",
        ];
        let skip = match text {
            // The check writes at random places.
            "truncate?truncate=3000000" => {
                vec![("a_parked_payload_is_written_unseen", "the end takes only zeroes")]
            }
            _ => Vec::new(),
        };
        conform::check(
            text,
            ConformOptions { only, skip, ..ConformOptions::default() },
            move || async move {
                let registry = Registry { layers: crate::common::kinds(), ..Registry::default() };
                let model = Model::with_facts(Model::hinting_facts(2 << 20));
                let model = ModelDevice::new(model, CompletionOrder::Deferred);
                let device = registry.layer(text)?.open(LayerBase::alone(model.clone())).await?;
                assert_eq!(hints(&device.facts()), kept, "{text}");
                Ok(Subject::new(device).over(model))
            },
        );
    }
}
