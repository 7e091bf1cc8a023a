//! Plugins and filters of newer releases of nbdkit than that among the peers.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Output;

use blockhaul_testkit::tools::{ScratchDir, among_peers};
use blockhaul_tests::{LIMIT, bounded, compile_with, lossy, program, text};

const SOURCE: &str = "tests/tests/newer.c";

/// blockhaul in the place of nbdkit.
fn nbdkit(scratch: &ScratchDir, args: &[&str]) -> Output {
    let ours = scratch.file("nbdkit");
    if !ours.exists() {
        symlink(program(), &ours).unwrap();
    }
    bounded(among_peers(&ours).unwrap().args(args), LIMIT)
}

/// A filter that says that it is of this release.
fn filter_of(release: &str, scratch: &ScratchDir) -> Option<PathBuf> {
    let release = OsString::from(format!("-DRELEASE=\"{release}\""));
    compile_with(Path::new(SOURCE), "FILTER", scratch, &[&release])
}

#[test]
fn what_a_filter_opens_for_all_connections_has_the_name_of_its_export() {
    let scratch = ScratchDir::new().unwrap();
    let flags = ["-DRELEASE=\"1.48.1\"", "-DSHARED"].map(OsStr::new);
    let Some(filter) = compile_with(Path::new(SOURCE), "FILTER", &scratch, &flags) else { return };
    let filter = format!("--filter={}", text(&filter));
    let script = ["eval", "open=echo $3", "get_size=echo $2", "pread=exit 1"];
    let run = ["-e", "3M", "--run", "nbdinfo --size \"$uri\""];
    let size = nbdkit(&scratch, &[&[filter.as_str()][..], &script, &run].concat());
    assert_eq!(lossy(&size.stdout).trim(), "3145728", "{size:?}");
}

#[test]
fn filters_of_newer_releases_are_hosted() {
    let scratch = ScratchDir::new().unwrap();
    let Some(filter) = filter_of("1.48.1", &scratch) else { return };
    let filter = format!("--filter={}", text(&filter));
    let dump = nbdkit(&scratch, &[&filter, "memory", "1M", "--dump-plugin"]);
    let said = lossy(&dump.stdout);
    // It gets the model of the plugin below, which is parallel, and makes it stricter.
    assert!(said.contains("newer_below=3\n"), "{said}{}", lossy(&dump.stderr));
    assert!(said.contains("\nthread_model=serialize_requests\n"), "{said}");
    let map =
        nbdkit(&scratch, &[&filter, "memory", "5G", "--run", "nbdinfo --map --totals \"$uri\""]);
    assert_eq!(lossy(&map.stdout).split_whitespace().next(), Some("5368709120"), "{map:?}");
}

#[test]
fn filters_of_unknown_releases_are_refused_by_name_and_release() {
    for release in ["1.40.5", "1.43.8", "1.50.0"] {
        let scratch = ScratchDir::new().unwrap();
        let Some(filter) = filter_of(release, &scratch) else { return };
        let output = nbdkit(&scratch, &[&format!("--filter={}", text(&filter)), "memory", "1M"]);
        let said = lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        for part in [text(&filter), release, "1.42, 1.44, 1.46 and 1.48", "blockhaul help layers"] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}

#[test]
fn plugins_find_the_functions_of_newer_releases() {
    let scratch = ScratchDir::new().unwrap();
    let Some(plugin) = compile_with(Path::new(SOURCE), "PLUGIN", &scratch, &[]) else { return };
    let output = nbdkit(&scratch, &["-fv", "--name=in", text(&plugin), "--run", "true"]);
    let said = lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    for line in [
        "dump 00000100: 30 31 32 33 34 35 36 37  38 39 61 62 63 64 65 66  |0123456789abcdef|",
        "dump 00000110: 21                                                |!               |",
        "-00000000:       30 31 32 33                                 |  0123          |",
        "+00000000:          78                                       |   x            |",
        "name in",
    ] {
        assert!(
            said.lines().any(|said| said == format!("nbdkit[in]: debug: {line}")),
            "{line}: {said}"
        );
    }
    let time = said.lines().find_map(|line| line.strip_prefix("nbdkit[in]: debug: time ")).unwrap();
    assert_eq!(time.len(), "2026-01-01 12:00:00.000333".len(), "{time}");
    let output = nbdkit(&scratch, &["-fv", text(&plugin), "--run", "true"]);
    assert!(lossy(&output.stderr).contains("debug: name (none)\n"));
}
