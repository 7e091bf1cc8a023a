//! Storage that is too small, full, broken, read-only, or the source itself.

use super::*;

#[test]
fn a_target_that_cannot_take_the_source_is_refused_untouched() {
    let nbdkit = require_peer!("nbdkit");
    let qemu_nbd = require_peer!("qemu-nbd");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let small = scratch.file("small");
    random_image(&image, 2 << 20);
    garbage(&small, (2 << 20) - 512).unwrap();
    let untouched = scratch.file("untouched");
    fs::copy(&small, &untouched).unwrap();
    let source = text(&image);
    let shared = format!("file:{}?lock=off", text(&small));
    let ours = serve(&scratch, "s", &[&shared]);
    let args = ["file", text(&small)];
    let nbdkits = PeerServer::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    let args = ["-e", "4", "-f", "raw", text(&small)];
    let qemus = PeerServer::qemu_nbd(&qemu_nbd, &scratch.socket("q"), &args).unwrap();
    for server in [&ours, &nbdkits, &qemus] {
        let words = ["smaller", "2097152", "2096640", text(server.socket())];
        refused(&["copy", source, &server.uri("")], OPEN, &words);
    }
    refused(&["copy", source, "memory:1M"], OPEN, &["smaller", "2097152", "1048576"]);
    drop((ours, nbdkits, qemus));
    assert_same(&small, &untouched, "a refused copy wrote");

    let ours = serve(&scratch, "r", &["-r", text(&image)]);
    let args = ["-r", "file", text(&image)];
    let nbdkits = PeerServer::nbdkit(&nbdkit, &scratch.socket("l"), &args).unwrap();
    let args = ["-r", "-e", "4", "-f", "raw", text(&image)];
    let qemus = PeerServer::qemu_nbd(&qemu_nbd, &scratch.socket("p"), &args).unwrap();
    for server in [&ours, &nbdkits, &qemus] {
        refused(&["copy", "zero:1M", &server.uri("")], OPEN, &["read-only", text(server.socket())]);
    }
    refused(&["copy", "zero:1M", "pattern:1M"], OPEN, &["pattern:1M", "cannot be written"]);
    refused(&["copy", "zero:1M", text(scratch.path())], USAGE, &["directory"]);
    refused(&["copy", "zero:1M", "/dev/null"], USAGE, &["/dev/null", "null:"]);
    let nowhere = scratch.file("no/such/folder");
    refused(&["copy", "zero:1M", text(&nowhere)], OPEN, &[text(&nowhere)]);
}

#[test]
fn a_full_target_has_a_status_of_its_own() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    garbage(&image, 24 << 20).unwrap();
    let source = text(&image);
    let args = ["--filter=error", "memory", "24M", "error-pwrite=ENOSPC", "error-pwrite-rate=30%"];
    let nbdkits = PeerServer::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    let layer = ["--layer", "error?error=ENOSPC&write=100%&after=10", "memory:24M"];
    let ours = serve(&scratch, "s", &layer);
    for server in [&nbdkits, &ours] {
        let words = ["target", "space", text(server.socket()), "; "];
        refused(&["copy", source, &server.uri("")], FULL, &words);
    }

    // A file system that is really full, in a mount namespace of its own.
    let mount = scratch.file("mount");
    fs::create_dir(&mount).unwrap();
    let target = mount.join("target");
    let within = |line: &str| {
        let mut command = Command::new("unshare");
        let root = fs::metadata("/proc/self")
            .is_ok_and(|data| std::os::unix::fs::MetadataExt::uid(&data) == 0);
        command.arg(if root { "-m" } else { "-rm" });
        let line = format!("mount -n -t tmpfs -o size=8m none \"$0\" || exit 99; {line}");
        command.args(["sh", "-c", &line, text(&mount)]).arg(blockhaul_tests::program());
        command.args([source, text(&target)]);
        bounded(&mut command, SOON)
    };
    let output = within("\"$1\" copy \"$2\" \"$3\"");
    if output.status.code() == Some(99) || lossy(&output.stderr).contains("unshare") {
        return tools::skip(format!("no tmpfs of its own: {}", lossy(&output.stderr)));
    }
    refused_by(&output, "a full tmpfs", FULL, &["target", "space", text(&target), "; "]);
    let serving = "truncate -s 24m \"$3\"; \"$1\" serve \"$3\" --run \"$1 copy $2 \\$uri\"";
    let mut output = within(serving);
    // The server's log is on the same terminal.
    let said = lossy(&output.stderr);
    let (log, rest): (Vec<&str>, _) =
        said.lines().partition(|line| line.starts_with("blockhaul: warning: connection "));
    assert!(log.iter().all(|line| line.contains("No space left on device")), "{said}");
    output.stderr = rest.join("\n").into_bytes();
    refused_by(&output, "a served full tmpfs", FULL, &["target", "space", "; "]);
}

#[test]
fn a_bad_block_is_told_with_its_side_and_place() {
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    garbage(&image, 16 << 20).unwrap();
    let source = text(&image);
    let to = text(&target);
    // The request of 64 KiB that holds it.
    let bad = 0x0012_3456;
    let place = (bad / 65536 * 65536).to_string();
    let size = "--request-size=64k";
    let layer = format!("error?at={bad}&read=100%");
    let line = refused(
        &["copy", size, "--source-layer", &layer, source, to],
        SOURCE,
        &["source", source, &place, "read", "; "],
    );
    assert!(line.contains("65536") || line.contains("64"), "{line}");
    let layer = format!("error?at={bad}&write=100%");
    refused(
        &["copy", size, "--target-layer", &layer, source, to],
        TARGET,
        &["target", to, &place, "write", "; "],
    );
    let layer = format!("error?at={bad}&read=100%&write=100%");
    let server = serve(&scratch, "s", &["--layer", &layer, source]);
    let uri = server.uri("");
    let words = [text(server.socket()), &place, "; "];
    refused(&["copy", size, &uri, to], SOURCE, &words);
    refused(&["copy", size, source, &uri], TARGET, &words);
    let verify = ["copy", "--verify", size, "-C", "1", "--target-layer"];
    let layer = format!("error?at={bad}&read=100%");
    let line = refused(
        &[&verify[..], &[&layer, source, to]].concat(),
        TARGET,
        &["verification", "target failed", to, "read", "; "],
    );
    let number = |before: &str| -> u64 {
        let digits = line.split_once(before).map(|(_, rest)| rest).unwrap_or_default();
        digits.split(' ').next().unwrap_or_default().trim_end_matches(':').parse().unwrap()
    };
    let at = number("at offset ");
    let len = number("read of ");
    assert!((at..at + len).contains(&bad), "{line}");
}

#[test]
fn a_bad_block_behind_another_server_is_told_with_its_place() {
    let nbdkit = require_peer!("nbdkit");
    let scratch = ScratchDir::new().unwrap();
    let target = scratch.file("target");
    let bad = 0x0012_3456;
    let place = (bad / 65536 * 65536).to_string();
    let read = format!(
        "if [ $4 -le {bad} ] && [ $(( $4 + $3 )) -gt {bad} ]; then echo EIO bad >&2; exit 1; fi; \
         head -c $3 /dev/zero"
    );
    let read = format!("pread={read}");
    let args = ["eval", "get_size=echo 16M", &read, "thread_model=echo parallel"];
    let server = PeerServer::nbdkit(&nbdkit, &scratch.socket("k"), &args).unwrap();
    let words = ["source", text(server.socket()), &place, "; "];
    let args = ["copy", "--request-size=64k", &server.uri(""), text(&target)];
    refused(&args, SOURCE, &words);
}

#[test]
fn a_target_that_is_the_source_is_refused_by_any_name() {
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let before = scratch.file("before");
    random_image(&image, 1 << 20);
    fs::copy(&image, &before).unwrap();
    let link = scratch.file("link");
    let hard = scratch.file("hard");
    symlink(&image, &link).unwrap();
    fs::hard_link(&image, &hard).unwrap();
    let source = text(&image);
    let named = format!("file:{source}");
    let roundabout = format!("{}/../{}", text(scratch.path()), {
        let name = scratch.path().file_name().unwrap().to_str().unwrap();
        format!("{name}/image")
    });
    for target in [source, text(&link), text(&hard), &named, &roundabout] {
        refused(&["copy", source, target], USAGE, &["same", source]);
        refused(&["copy", target, source], USAGE, &["same"]);
    }
    let server = serve(&scratch, "s", &["-e", "disk", source]);
    let uri = server.uri("disk");
    refused(&["copy", &uri, &uri], USAGE, &["same"]);
    let encoded = uri.replace("/disk", "/%64isk");
    assert_ne!(uri, encoded);
    refused(&["copy", &uri, &encoded], USAGE, &["same"]);
    assert_same(&image, &before, "a refused copy changed its source");
}

#[test]
fn a_source_that_shrinks_fails_and_its_server_goes_on() {
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let target = scratch.file("target");
    let shrink = || File::options().write(true).open(&image).unwrap().set_len(4 << 20).unwrap();
    garbage(&image, 64 << 20).unwrap();
    let source = text(&image);
    let args = ["copy", "--source-layer", "rate?rate=10M", source, text(&target)];
    let output = meanwhile(&args, &target, shrink);
    refused_by(&output, "a file that shrinks", SOURCE, &["source", source, "; "]);

    fs::remove_file(&target).unwrap();
    garbage(&image, 64 << 20).unwrap();
    let server = serve(&scratch, "s", &["-r", "--layer", "rate?rate=10M", source]);
    let output = meanwhile(&["copy", &server.uri(""), text(&target)], &target, shrink);
    refused_by(&output, "a served file that shrinks", SOURCE, &["source", "; "]);
    // The server continues.
    assert_eq!(succeed(&["info", "--size", &server.uri("")]), format!("{}\n", 64 << 20));
}
