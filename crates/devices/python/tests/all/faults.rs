//! Plugins that are wrong, fail, hang and die.

use std::time::Duration;

use blockhaul_block::{Kind, Result};

use crate::{Plugin, read, run};

/// The error of a script that cannot be started.
async fn refused(script: &str, options: &str) -> String {
    match Plugin::of(script, options).await {
        Ok(_) => panic!("{script} starts"),
        Err(error) => {
            assert_eq!(error.kind(), Kind::Usage, "{error}");
            error.to_string()
        }
    }
}

#[test]
fn scripts_that_cannot_start_say_why() {
    run(|| async {
        const WHOLE: &str = "def open(r): return 1\ndef get_size(h): return 1\ndef pread(): pass\n";
        for (script, options, why) in [
            ("def open(", "", "SyntaxError: '(' was never closed"),
            ("def open(r): pass", "", "no function get_size and no pread"),
            ("import no_such_module", "", "ModuleNotFoundError: No module named 'no_such_module'"),
            ("raise SystemExit(3)", "", "SystemExit: 3"),
            (WHOLE, "?a=1", "takes no parameters, but a="),
            (&format!("{WHOLE}API_VERSION = 3"), "", "API_VERSION is 3"),
            (
                &format!("{WHOLE}def config(k, v): raise ValueError(k + v)"),
                "?a=1",
                "config: ValueError: a1",
            ),
            (&format!("{WHOLE}def get_ready(): 1 / 0"), "", "get_ready: ZeroDivisionError"),
            (&format!("{WHOLE}def thread_model(): return 7"), "", "thread_model returned 7"),
        ] {
            let error = refused(script, options).await;
            assert!(error.contains(why) && error.contains("disk.py"), "{error}");
        }
        let error = Plugin::of(WHOLE, "?@python=/no/such/python").await.err().unwrap().to_string();
        assert!(error.contains("cannot start /no/such/python"), "{error}");
        let error = Plugin::of(WHOLE, "?@python=true").await.err().unwrap().to_string();
        assert!(error.contains("ended") || error.contains("does not run"), "{error}");
    });
}

#[test]
fn a_script_that_ends_its_process_at_once_is_an_error() {
    run(|| async {
        let error = Plugin::of("import os\nos._exit(4)", "").await.err().unwrap().to_string();
        assert!(error.contains("ended with exit status: 4"), "{error}");
    });
}

#[test]
fn callbacks_that_fail_are_errors_of_their_requests_alone() {
    run(|| async {
        let script = "
def pread(h, buf, offset, flags):
    what = offset // 4096
    if what == 1: raise ValueError('something')
    if what == 2: nbdkit.set_error(errno.ENOSPC); raise ValueError('full')
    if what == 3: return
    if what == 4: buf[:100] = bytes(100); return
    if what == 5: buf[:] = bytes(1)
    if what == 6: raise SystemExit(1)
    if what == 7: nbdkit.set_error(99999); raise KeyboardInterrupt
    if what == 8: del buf; return
    buf[:] = bytes(len(buf))
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let device = plugin.device().await.unwrap();
        for (what, kind, why) in [
            (1, Kind::Io, "disk.py: pread: ValueError: something"),
            (2, Kind::NoSpace, "full"),
            (3, Kind::Io, "did not fill its buffer of 4096 bytes"),
            (4, Kind::Io, "did not fill its buffer of 4096 bytes"),
            (5, Kind::Io, "ValueError"),
            (6, Kind::Io, "SystemExit: 1"),
            (7, Kind::Io, "KeyboardInterrupt"),
            (8, Kind::Io, "did not fill"),
        ] {
            let error = read(&device, what * 4096, 4096).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{what}: {error}");
            assert!(error.to_string().contains(why), "{what}: {error}");
            read(&device, 0, 4096).await.unwrap();
        }
    });
}

#[test]
fn handles_with_wrong_answers_are_refused() {
    run(|| async {
        for (callback, why) in [
            ("def get_size(h): return 'x'", "get_size returned 'x'"),
            ("def get_size(h): return -1", "get_size returned -1"),
            ("def get_size(h): return 1 << 63", "get_size returned 9223372036854775808"),
            ("def open(r): raise OSError('no')", "OSError: no"),
            ("def block_size(h): return 1, 2", "block_size returned (1, 2)"),
            ("def block_size(h): return 3, 4096, 8192", "are no block sizes"),
            ("def export_description(h): return 5", "export_description returned 5"),
            ("def can_fua(h): return 3", "can_fua returned 3"),
            ("def preconnect(r): raise OSError('not you')", "not you"),
        ] {
            let plugin = Plugin::start(callback, "").await.unwrap();
            let error = plugin.device().await.err().expect(callback).to_string();
            assert!(error.contains(why), "{callback}: {error}");
        }
    });
}

const DIES: &str = "
def pread(h, buf, offset, flags):
    if offset == 4096: os._exit(5)
    if offset == 8192: os.kill(os.getpid(), 9)
    if offset == 12288: time.sleep(1000)
    buf[:] = bytes(len(buf))
";

#[test]
fn a_plugin_that_dies_fails_its_requests_and_the_next_client_gets_a_new_one() {
    run(|| async {
        let other = Plugin::start("", "").await.unwrap();
        let untouched = other.device().await.unwrap();
        for (at, how) in [(4096, "exit status: 5"), (8192, "signal: 9")] {
            let plugin = Plugin::start(DIES, "").await.unwrap();
            let device = plugin.device().await.unwrap();
            let error = read(&device, at, 512).await.unwrap_err();
            assert_eq!(error.kind(), Kind::Io);
            assert!(error.to_string().contains(how), "{error}");
            let later = read(&device, 0, 512).await.unwrap_err();
            assert!(later.to_string().contains(how), "{later}");
            let next = plugin.device().await.unwrap();
            read(&next, 0, 512).await.unwrap();
            assert!(read(&device, 0, 512).await.is_err(), "its writes may be lost");
            let state = plugin.exports.state().unwrap();
            assert!(state.ends_with("started 2 times"), "{state}");
            assert!(read(&next, at, 512).await.is_err());
            let soon: Result<_> = plugin.device().await;
            let soon = soon.err().expect("two early ends").to_string();
            assert!(soon.contains("can be restarted in"), "{soon}");
        }
        read(&untouched, 0, 512).await.unwrap();
    });
}

#[test]
fn a_callback_that_hangs_fails_in_time_and_is_ended() {
    run(|| async {
        let plugin = Plugin::start(DIES, "?@timeout=500ms").await.unwrap();
        let device = plugin.device().await.unwrap();
        let error = read(&device, 12288, 512).await.unwrap_err();
        assert_eq!(error.kind(), Kind::TimedOut);
        assert!(error.to_string().contains("has not returned after 0.5 s"), "{error}");
        while plugin.exports.state().unwrap() != "down" {
            blockhaul_io::sleep(Duration::from_millis(20)).await;
        }
        read(&plugin.device().await.unwrap(), 0, 512).await.unwrap();
    });
}

#[test]
fn a_fork_that_returns_answers_nothing() {
    run(|| async {
        let script = "
def pread(h, buf, offset, flags):
    os.fork()
    buf[:] = bytes(len(buf))
";
        let plugin = Plugin::start(script, "").await.unwrap();
        let device = plugin.device().await.unwrap();
        for _ in 0..5 {
            assert_eq!(read(&device, 0, 512).await.unwrap(), [0; 512]);
        }
    });
}

#[test]
fn extents_are_checked() {
    run(|| async {
        for (answer, why) in [
            ("[]", "extents returned an empty list"),
            ("5", "TypeError"),
            ("[(1, 2)]", "extents returned (1, 2)"),
            ("[(offset, -1, 0)]", "not three numbers"),
            ("[(offset + 1, count, 0)]", "behind the start"),
            ("[(offset, 512, 0), (offset + 1024, 512, 0)]", "gaps"),
        ] {
            let script = format!("def extents(h, count, offset, flags): return {answer}\n");
            let plugin = Plugin::start(&script, "").await.unwrap();
            let device = plugin.device().await.unwrap();
            let asked =
                blockhaul_block::Request::extents(512, 4096, blockhaul_block::ContextSet::first());
            let error = device.submit(asked).await.unwrap_err().to_string();
            assert!(error.contains(why), "{answer}: {error}");
        }
    });
}
