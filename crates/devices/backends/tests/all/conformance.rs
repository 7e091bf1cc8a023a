//! Every backend fulfils the contract of devices, on every engine.

use std::ffi::OsStr;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhaul_block::RequestFlags;
use blockhaul_catalog::{DeviceSpec, DirectMode, Intent, Registry, Stack};
use blockhaul_testkit::conform::{self, ConformOptions, InitialContent, Subject};
use blockhaul_testkit::tools;

async fn open(spec: &str, intent: Intent) -> blockhaul_block::Result<Stack> {
    let registry = Registry {
        backends: crate::backends(),
        path: blockhaul_backends::PATH_SCHEME,
        ..Registry::default()
    };
    registry.open(&DeviceSpec::parse(OsStr::new(spec))?, Vec::new(), intent).await
}

/// A device that is made from its description alone.
fn check(spec: &'static str, options: ConformOptions) {
    conform::check(spec, options, move || open(spec, Intent::WRITE));
}

#[test]
fn memory() {
    check("memory:8M", ConformOptions::default().content(InitialContent::Zeroes));
    check("memory:1000001", ConformOptions::default().content(InitialContent::Zeroes));
    check("memory:9223372036854775807", ConformOptions::default().content(InitialContent::Zeroes));
}

#[test]
fn null_and_zero() {
    let forgets = ConformOptions {
        keeps_writes: false,
        ..ConformOptions::default().content(InitialContent::Zeroes)
    };
    check("null:1T", forgets.clone());
    check("null:", forgets);
    check("zero:5000000", ConformOptions::default().content(InitialContent::Zeroes));
}

#[test]
fn pattern() {
    let pattern = |at: u64| (at & !7).to_be_bytes()[(at % 8) as usize];
    for spec in ["pattern:3M", "pattern:12345", "pattern:9223372036854775807"] {
        check(spec, ConformOptions::default().content(InitialContent::oracle(pattern)));
    }
}

#[test]
fn sample() {
    check("sample:20M", ConformOptions::default());
    check("sample:1000?data=100%", ConformOptions::default());
    let walk = "extents_start_at_the_offset_and_end_within_the_request";
    let options =
        ConformOptions::default().without(walk, "walking 2^63 bytes of mixed runs never ends");
    check("sample:9223372036854775807?seed=3", options);
}

#[test]
fn ones_and_random() {
    check("ones:3000001", ConformOptions::default().content(InitialContent::oracle(|_| 255)));
    check("ones:1M?byte=7", ConformOptions::default().content(InitialContent::oracle(|_| 7)));
    check("random:3000001?seed=5", ConformOptions::default());
}

#[test]
fn full_can_be_read_and_not_written() {
    // All other checks write.
    let reads = vec![
        "the_facts_are_consistent",
        "the_content_is_as_told",
        "one_extent_means_one",
        "the_fence_refuses_what_the_facts_forbid",
    ];
    let reads = ConformOptions { only: reads, keeps_writes: false, ..ConformOptions::default() };
    check("full:3000001", reads.content(InitialContent::Zeroes));
    let runtime = blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig {
        workers: 1,
        ..Default::default()
    })
    .unwrap();
    runtime.block_on(|| async {
        let stack = open("full:1M", Intent::WRITE).await.unwrap();
        let device = stack.device();
        let requests = [
            blockhaul_block::Request::write(5, blockhaul_io::Data::copy_of(b"x")),
            blockhaul_block::Request::zero(0, 1 << 20),
        ];
        for request in requests {
            let error = device.submit(request).await.unwrap_err();
            assert_eq!(error.kind(), blockhaul_block::Kind::NoSpace);
        }
    });
}

#[test]
fn split() {
    let options = ConformOptions::default().content(InitialContent::Zeroes).without(
        "no_hole_keeps_the_range_allocated",
        "extents of files do not tell reserved blocks from holes",
    );
    conform::check("split", options, || async {
        let dir = tempfile::tempdir().unwrap();
        let mut names = Vec::new();
        for (index, size) in [1_000_001, 0, 5, 3 << 20, 4096].into_iter().enumerate() {
            let path = dir.path().join(format!("{index}, part"));
            std::fs::File::create(&path).unwrap().set_len(size).unwrap();
            names.push(path.to_str().unwrap().replace(',', "%2c"));
        }
        let stack = open(&format!("split:{}", names.join(",")), Intent::WRITE).await?;
        assert_eq!(stack.device().facts().size, 1_000_001 + 5 + (3 << 20) + 4096);
        Ok(Subject::from(stack).keep(dir))
    });
}

#[test]
fn extents_of_split_files_come_in_one_answer() {
    let dir = blockhaul_testkit::tools::ScratchDir::on_disk().unwrap();
    let one = dir.file("one");
    let two = dir.file("two");
    for (path, at) in [(&one, 1 << 20), (&two, 0)] {
        let file = std::fs::File::create(path).unwrap();
        file.set_len(2 << 20).unwrap();
        file.write_all_at(&[1; 1 << 20], at).unwrap();
        // Blocks that are only reserved may be reported as holes.
        file.sync_all().unwrap();
    }
    let spec = format!("split:{},{}", one.display(), two.display());
    let runtime = blockhaul_io::Runtime::start(&blockhaul_io::RuntimeConfig {
        workers: 1,
        ..Default::default()
    })
    .unwrap();
    runtime.block_on(move || async move {
        let stack = open(&spec, Intent::READ).await.unwrap();
        let told = async |request: blockhaul_block::Request| {
            let Ok(blockhaul_block::Reply::Extents(lists)) = stack.device().submit(request).await
            else {
                panic!("no extents");
            };
            lists[0].runs().iter().map(|run| (run.len >> 10, run.state)).collect::<Vec<_>>()
        };
        let base = blockhaul_block::ContextSet::first();
        let whole = blockhaul_block::Request::extents(0, 4 << 20, base);
        assert_eq!(told(whole).await, [(1024, 3), (2048, 0), (1024, 3)]);
        let one = blockhaul_block::Request::extents(3 << 19, 1 << 20, base)
            .with(RequestFlags::ONE_EXTENT);
        assert_eq!(told(one).await, [(512, 0)]);
    });
}

#[test]
fn partitioning() {
    let only = vec![
        "the_facts_are_consistent",
        "the_content_is_as_told",
        "the_fence_refuses_what_the_facts_forbid",
    ];
    let options = ConformOptions { only, ..ConformOptions::default() };
    conform::check("partitioning", options, || async {
        let dir = tempfile::tempdir().unwrap();
        let mut names = Vec::new();
        for (index, size) in [1_000_001, 5, 3 << 20, 4096, 7].into_iter().enumerate() {
            let path = dir.path().join(format!("{index}"));
            std::fs::File::create(&path).unwrap().set_len(size).unwrap();
            names.push(path.to_str().unwrap().to_string());
        }
        let stack = open(&format!("partitioning:{}", names.join(",")), Intent::WRITE).await?;
        Ok(Subject::from(stack).keep(dir))
    });
}

#[test]
fn sparse_random() {
    // All other checks write.
    let only = vec![
        "the_facts_are_consistent",
        "the_content_is_as_told",
        "the_fence_refuses_what_the_facts_forbid",
    ];
    let options = ConformOptions { only, ..ConformOptions::default() };
    check("sparse-random:20000001?percent=40&runlength=64k", options.clone());
    check("sparse-random:5M?percent=100%&random-content=on", options);
}

#[test]
fn info() {
    // All other checks write.
    let only = vec!["the_facts_are_consistent", "the_fence_refuses_what_the_facts_forbid"];
    check("info:time", ConformOptions { only, ..ConformOptions::default() });
}

#[test]
fn data() {
    let content = |at: u64| if at == 0 { 7 } else { u8::from(at >= 100) };
    check(
        "data:7 @100 1*99900",
        ConformOptions::default().content(InitialContent::oracle(content)),
    );
}

/// A directory to test in, on a file system in memory or on a disk.
fn folders() -> Vec<PathBuf> {
    let disk = Path::new(env!("CARGO_TARGET_TMPDIR")).to_path_buf();
    let memory = PathBuf::from("/dev/shm");
    if !memory.is_dir() {
        tools::skip("no file system is in memory at /dev/shm: checked on disk only");
        return vec![disk];
    }
    vec![memory, disk]
}

/// A new file of `size` bytes as a copy target, in each directory.
fn check_file(size: u64, query: &'static str, direct: DirectMode) {
    for folder in folders() {
        let name = format!("{size} bytes in {}{query}", folder.display());
        // lseek(2) reports blocks as a hole that are allocated but were never written.
        let options = ConformOptions::default().content(InitialContent::Zeroes).without(
            "no_hole_keeps_the_range_allocated",
            "extents of files do not tell reserved blocks from holes; blocks are counted instead",
        );
        conform::check(&name, options, move || {
            let folder = folder.clone();
            async move {
                let dir = Arc::new(tempfile::tempdir_in(&folder).expect("a folder for the test"));
                let spec = format!("file:{}{query}", dir.path().join("disk").display());
                let stack = open(&spec, Intent::target(size).direct(direct)).await?;
                Ok(Subject::from(stack).keep(dir))
            }
        });
    }
}

#[test]
fn file_through_the_page_cache() {
    check_file(6 << 20, "", DirectMode::Off);
}

#[test]
fn file_of_odd_size() {
    check_file(1_000_001, "", DirectMode::Off);
}

#[test]
fn file_direct() {
    check_file(6 << 20, "?direct=on", DirectMode::Off);
}

#[test]
fn file_direct_of_odd_size() {
    check_file(1_000_001, "?direct=on", DirectMode::Off);
}

#[test]
fn file_past_the_page_cache_where_that_can_be_done() {
    check_file(6 << 20, "", DirectMode::Auto);
    check_file(1_000_001, "", DirectMode::Auto);
}
