//! Calls that are interrupted or refused, writes that fail, connections that die.

use blockhaul_testkit::tools::until;

use super::*;

#[test]
fn interrupted_calls_are_gone_on_with() {
    let scratch = ScratchDir::new().unwrap();
    let source = scratch.file("source.img");
    let size = (3 << 20) + 1234;
    garbage(&source, size).unwrap();
    let file = scratch.file("file.img");
    let target = scratch.file("target.img");
    std::fs::File::create(&target).unwrap().set_len(size).unwrap();
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    let to = serve(&scratch, "to", &[text(&target)]);
    let from_uri = from.uri("");
    let to_uri = to.uri("");
    let cases = [
        (text(&source), &*to_uri, &target),
        (&*from_uri, &*to_uri, &target),
        (&*from_uri, text(&file), &file),
        (text(&source), text(&file), &file),
    ];
    let options: [&[&str]; 5] = [
        &["-S", "0"],
        &["-S", "4096"],
        &["--no-zero-copy"],
        &["--engine=threads"],
        &["--direct=on"],
    ];
    for (from_name, to_name, changed) in cases {
        for options in options {
            let what = format!("{options:?}, {from_name} to {to_name}");
            let command = || copy(&[&["--verify"], options, &[from_name, to_name]].concat());
            garbage(changed, size).unwrap();
            interrupted(command, &[from.pid(), to.pid()], &what, |_| {
                assert_same(&source, changed, &what);
                garbage(changed, size).unwrap();
            });
        }
    }
}

/// What each refusal keeps from being used.
const REFUSED: [(&str, &[&str]); 8] = [
    ("io_uring_setup", &[]),
    ("io_uring_register", &[]),
    (
        "splice",
        &["file-to-socket", "socket-to-socket", "socket-to-file", "file-to-file", "vmsplice"],
    ),
    ("vmsplice", &["vmsplice"]),
    ("cachestat", &[]),
    ("cachestat,mincore,preadv2", &[]),
    ("copy_file_range,fallocate", &["copy-file-range"]),
    ("reflink", &["reflink"]),
];

#[test]
fn what_a_sandbox_refuses_is_done_another_way() {
    let scratch = ScratchDir::new().unwrap();
    let disk = ScratchDir::on_disk().unwrap();
    let xfs = Mounted::xfs();
    let source = image(&scratch);
    let cold = disk.file("source.img");
    image::sparse(&cold, (64 << 20) + 77, seed()).unwrap();
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    let target = scratch.file("target.img");
    std::fs::File::create(&target).unwrap().set_len(SIZE).unwrap();
    let to = serve(&scratch, "to", &[text(&target)]);
    let near = disk.file("target.img");
    let far = disk.file("copied.img");
    let mut cases = vec![
        (from.uri(""), to.uri(""), &source, target.clone()),
        (text(&source).to_string(), to.uri(""), &source, target.clone()),
        (from.uri(""), text(&near).to_string(), &source, near.clone()),
        (text(&cold).to_string(), text(&far).to_string(), &cold, far.clone()),
    ];
    let shared = xfs.as_ref().map(|xfs| (xfs.file("source.img"), xfs.file("target.img")));
    if let Some((one, two)) = &shared {
        std::fs::copy(&source, one).unwrap();
        cases.push((text(one).to_string(), text(two).to_string(), one, two.clone()));
    }
    for (calls, gone) in REFUSED {
        for errno in ["EPERM", "ENOSYS"] {
            for (from, to, source, target) in &cases {
                make_cold(source);
                // Looked at in part, so that both kinds of payload are on their way.
                let told = format!("{from} to {to} without {calls} ({errno})");
                let taken = routes(&mut refusing(errno, calls, &copy(&[from, to])));
                assert_same(source, target, &told);
                none(&taken, gone);
            }
        }
    }
}

/// Payloads that stay in the kernel, and payloads that are sent from memory by reference.
const LOOKS: [(&str, &str); 2] = [("0", "socket-to-socket"), ("4096", "vmsplice")];

#[test]
fn writes_that_fail_in_the_middle_are_repeated_with_the_right_bytes() {
    let scratch = ScratchDir::new().unwrap();
    let source = image(&scratch);
    let target = scratch.file("target.img");
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    for (look, route) in LOOKS {
        garbage(&target, SIZE).unwrap();
        let failing = ["--layer", "error?write=0.2", text(&target)];
        let to = serve(&scratch, "to", &failing);
        let mut command = copy(&["-S", look, "--retries=100", "--retry-delay=1ms"]);
        let taken = routes(command.args([from.uri(""), to.uri("")]));
        some(&taken, route);
        assert_same(&source, &target, route);
        to.stop().unwrap();
    }
}

#[test]
fn a_connection_that_dies_with_payloads_on_their_way_leaves_the_right_bytes() {
    let scratch = ScratchDir::new().unwrap();
    let source = image(&scratch);
    let target = scratch.file("target.img");
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    for (look, route) in LOOKS {
        garbage(&target, SIZE).unwrap();
        // Slow enough for requests to be on their way when it ends.
        let slow = ["--layer", "delay?write=100ms", text(&target)];
        let to = serve(&scratch, route, &slow);
        let uri = to.uri("");
        let mut command = copy(&["-S", look, "--retries=1000", "--retry-delay=20ms", "-C", "2"]);
        command.args(["--rate=16M", &from.uri(""), &uri]);
        let modified = || target.metadata().and_then(|data| data.modified()).unwrap();
        let before = modified();
        let copying = std::thread::spawn(move || routes(&mut command));
        until("something is written", || modified() > before);
        let killed = Command::new("kill").args(["-9", &to.pid().to_string()]).status().unwrap();
        assert!(killed.success());
        drop(to);
        let _ = std::fs::remove_file(scratch.socket(route));
        let _again = serve(&scratch, route, &[text(&target)]);
        let taken = copying.join().unwrap();
        some(&taken, route);
        assert_same(&source, &target, route);
    }
}
