//! The example of an asynchronous plugin on an event loop: a disk behind a URL.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use blockhaul_testkit::tools::{PeerProgram, ScratchDir, SkipReason, among_peers, skip_or_fail};
use blockhaul_tests::{LIMIT, assert_same, bounded, compile_with, distinct, lossy, program, text};

/// The example, compiled with the peers' libcurl, among which the program runs.
fn plugin(scratch: &ScratchDir) -> Option<PathBuf> {
    let nbdkit = PeerProgram::require("nbdkit")?;
    let root = nbdkit.program().parent()?.parent()?.join("root/usr");
    let headers = root.join("include/x86_64-linux-gnu/curl");
    if !headers.is_dir() {
        skip_or_fail(&SkipReason::new("the peers have no headers of libcurl"));
        return None;
    }
    // Nothing else of the peers' headers: the C library is this machine's.
    let include = scratch.file("curl");
    fs::create_dir(&include).unwrap();
    std::os::unix::fs::symlink(headers, include.join("curl")).unwrap();
    let library = root.join("lib/x86_64-linux-gnu/libcurl-gnutls.so.4");
    let source = Path::new("crates/devices/cabi/examples/async-curl.c");
    let more = [OsStr::new("-I"), include.as_os_str(), library.as_os_str()];
    compile_with(source, "EXAMPLE", scratch, &more)
}

fn copy(plugin: &Path, options: &str, out: &Path) -> Output {
    let device = format!("nbdkit:{}?{options}", text(plugin));
    let mut command = among_peers(program()).unwrap();
    let script = format!("nbdcopy \"$uri\" {}", text(out));
    bounded(command.args(["serve", "-r", &device, "--run", &script]), LIMIT)
}

#[test]
fn a_disk_behind_a_url_is_read_over_few_connections() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = plugin(&scratch) else { return };
    let bytes = distinct(8 << 20);
    let input = scratch.file("in");
    let out = scratch.file("out");
    fs::write(&input, &bytes).unwrap();
    let server = crate::http::Server::start(bytes);
    let options = format!("url=http://{}/disk&connections=3", server.address);
    let output = copy(&plugin, &options, &out);
    assert!(output.status.success(), "{}", lossy(&output.stderr));
    assert_same(&input, &out, "through libcurl's event loop");
    assert!(server.most_connections() <= 4, "{} connections", server.most_connections());
}

#[test]
fn what_goes_wrong_is_told() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = plugin(&scratch) else { return };
    let server = crate::http::Server::start(vec![7; 1 << 20]);
    let address = server.address;
    for (options, wanted) in [
        (String::new(), "url=… is missing"),
        (format!("url=http://{address}/none"), "404"),
        ("url=http://127.0.0.1:1/disk".to_string(), "http://127.0.0.1:1/disk: "),
        (format!("url=http://{address}/disk&connections=0"), "connections=0"),
        (format!("url=http://{address}/disk&color=red"), "unknown parameter 'color'"),
    ] {
        let output = copy(&plugin, &options, &scratch.file("out"));
        let said = lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(wanted), "{options}: {said}");
    }
}
