//! Every layer keeps the contract of devices, on every engine, and what it wraps still does.

use std::ffi::OsStr;
use std::time::Duration;

use block::{Intent, Registry, Spec};
use testkit::conform::{self, Content, Options};

/// Puts layers over a device, the last one outermost, and runs the suite.
fn check(device: &'static str, layers: &'static [&'static str], options: Options) {
    let name = format!("{} over {device}", layers.join(" over "));
    conform::check(&name, options, move || async move {
        let registry = Registry {
            backends: backends::all(),
            layers: layers::all(),
            path: backends::PATH_SCHEME,
            ..Registry::default()
        };
        let configured =
            layers.iter().map(|text| registry.layer(text)).collect::<Result<_, _>>()?;
        registry.open(&Spec::parse(OsStr::new(device))?, configured, Intent::WRITE).await
    });
}

fn zeroes() -> Options {
    Options::default().content(Content::Zeroes)
}

#[test]
fn offset() {
    check("memory:9M", &["offset?offset=4097&range=5000001"], zeroes());
    let shifted = |at: u64| ((at + 4099) & !7).to_be_bytes()[((at + 4099) % 8) as usize];
    let options = Options::default().content(Content::oracle(shifted));
    check("pattern:9M", &["offset?offset=4099"], options);
}

#[test]
fn readonly() {
    check("memory:5M", &["readonly"], zeroes());
}

#[test]
fn delay() {
    let latency = Duration::from_millis(10);
    let options = Options { latency: Some(latency), rounds: 1, steps: 40, ..zeroes() };
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
    // Hardly any memory: everything is forgotten all the time.
    check("memory:9M", &["extents-cache?memory=1k&bulk=64k", "delay?extents=1ms"], zeroes());
    check("memory:5M", &["delay?extents=1ms&write=1ms", "extents-cache"], zeroes());
    check("sample:5M", &["extents-cache?bulk=1M"], Options::default());
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
