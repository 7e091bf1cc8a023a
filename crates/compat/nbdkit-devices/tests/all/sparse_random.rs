//! `sparse-random:` compared with nbdkit's plugin: the same disks.

use std::ffi::OsStr;
use std::process::Stdio;
use std::time::Duration;

use blockhaul_block::{BASE_ALLOCATION, DeviceExt, HOLE, Kind, Reply, Request};
use blockhaul_catalog::{DeviceSpec, Intent, Registry};
use blockhaul_io::{Data, Runtime, RuntimeConfig};
use blockhaul_testkit::tools::{ScratchDir, output};

async fn open(spec: String) -> blockhaul_block::Result<blockhaul_catalog::Stack> {
    let registry = Registry { backends: crate::backends(), ..Registry::default() };
    registry.open(&DeviceSpec::parse(OsStr::new(&spec))?, Vec::new(), Intent::WRITE).await
}

fn run<T: Send + 'static, F: Future<Output = T> + 'static>(
    job: impl FnOnce() -> F + Send + 'static,
) -> T {
    Runtime::start(&RuntimeConfig { workers: 1, ..RuntimeConfig::default() }).unwrap().block_on(job)
}

#[test]
fn disks_are_those_of_nbdkit() {
    let nbdkit = blockhaul_testkit::require_peer!("nbdkit");
    blockhaul_testkit::require_peer!("nbdcopy");
    let scratch = ScratchDir::new().unwrap();
    let out = scratch.file("out");
    let cases: &[(&[&str], &str)] = &[
        (&["20M", "seed=1", "runlength=100000", "percent=30"], "20M?runlength=100000&percent=30"),
        (
            &["4000001", "seed=77", "runlength=20000", "percent=55.5", "random-content=true"],
            "4000001?seed=77&runlength=20000&percent=55.5%&random-content=on",
        ),
        (&["1M", "seed=4294967295", "percent=100"], "1M?seed=4294967295&percent=100"),
        (&["1M", "seed=5", "runlength=100", "percent=50"], "1M?seed=5&runlength=100&percent=50"),
        (&["1M", "seed=5", "percent=0"], "1M?percent=0"),
        (&["100M", "seed=3"], "100M?seed=3"),
    ];
    for (parameters, options) in cases {
        let _ = std::fs::remove_file(&out);
        let mut command = nbdkit.command();
        command.args(["--exit-with-parent", "sparse-random"]).args(*parameters);
        command.arg("--run").arg(format!("nbdcopy \"$uri\" {}", out.display()));
        let told = output(command.stdin(Stdio::null()), Duration::from_secs(120)).unwrap();
        assert!(told.status.success(), "{told:?}");
        let theirs = std::fs::read(&out).unwrap();
        let spec = format!("sparse-random:{options}");
        let differs = run(move || async move {
            let stack = open(spec).await.unwrap();
            let device = stack.device();
            assert_eq!(device.facts().size, theirs.len() as u64);
            for at in (0..theirs.len()).step_by(1 << 20) {
                let theirs = &theirs[at..(at + (1 << 20)).min(theirs.len())];
                let ours = device.read(at as u64, theirs.len()).await.unwrap();
                if let Some(index) = (0..theirs.len()).find(|&i| theirs[i] != ours.bytes()[i]) {
                    return Some(at + index);
                }
            }
            None
        });
        assert_eq!(differs, None, "{parameters:?}");
    }
}

#[test]
fn parts_of_blocks_are_those_of_the_whole_and_can_be_written_again() {
    run(|| async {
        let spec = "sparse-random:1M?percent=50&runlength=16k&random-content=on";
        let stack = open(spec.to_string()).await.unwrap();
        let device = stack.device();
        let all = device.read(0, 1 << 20).await.unwrap().bytes().to_vec();
        for (at, len) in [(1, 5), (4095, 2), (5000, 9000), ((1 << 20) - 7, 7)] {
            let part = device.read(at, len).await.unwrap();
            assert_eq!(part.bytes(), &all[at as usize..at as usize + len], "{at}");
            device.write(at, part).await.unwrap();
        }
        let base = device.facts().context(BASE_ALLOCATION).unwrap();
        let Reply::Extents(lists) =
            device.submit(Request::extents(0, 1 << 20, base)).await.unwrap()
        else {
            panic!("no extents");
        };
        let mut kinds = [0, 0];
        for (at, extent) in lists[0].ranges(0) {
            let zero = all[at as usize..(at + extent.len) as usize].iter().all(|&byte| byte == 0);
            assert_eq!(zero, extent.state & HOLE != 0, "{at}");
            kinds[usize::from(zero)] += 1;
            let outcome = device.submit(Request::zero(at, extent.len)).await;
            assert_eq!(outcome.is_ok(), zero, "{at}");
            let error = device.write(at, Data::copy_of(&[!all[at as usize]])).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Io);
        }
        assert!(kinds[0] > 5 && kinds[1] > 5, "{kinds:?}");
    });
}

#[test]
fn mistakes_are_told() {
    let cases = [
        ("sparse-random:", "SIZE"),
        ("sparse-random:1M?percent=101", "0 to 100"),
        ("sparse-random:1M?percent=x", "0 to 100"),
        ("sparse-random:1M?runlength=0", "more than 0"),
        ("sparse-random:1M?seed=4294967296", "below 2^32"),
        ("sparse-random:17T", "more than 16 TiB"),
        ("sparse-random:1T?percent=50&runlength=1", "too many runs"),
    ];
    for (spec, part) in cases {
        let error = run(move || open(spec.to_string())).err().unwrap();
        assert_eq!(error.kind(), Kind::Usage, "{spec}");
        assert!(error.to_string().contains(part), "{spec}: {error}");
    }
}
