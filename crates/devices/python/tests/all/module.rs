//! The module `nbdkit`, and the life of a plugin.

use std::time::Duration;

use crate::{Plugin, read, run};

#[test]
fn parsers_accept_and_refuse_what_nbdkit_does() {
    run(|| async {
        let script = "
def fails(parse, *args, error=ValueError):
    try: parse(*args)
    except error: return True
size, delay, share = nbdkit.parse_size, nbdkit.parse_delay, nbdkit.parse_probability
assert [size(t) for t in ('0', '1k', '1M', '2s', '3KiB')] == [0, 1024, 1 << 20, 1024, 3072]
assert [size(t) for t in ('0x10M', '0x1E', '0x1_E', '0x10_0000', '1_M')] == \\
    [16 << 20, 30, 1 << 60, 1 << 20, 1 << 20]
assert all(fails(size, t) for t in ('', 'x', '-1', '1q', '8E', '1.5M', '1__0', '_1', '0x', '1_MiB'))
assert nbdkit.parse_bool('Yes') and not nbdkit.parse_bool('0') and fails(nbdkit.parse_bool, '2')
assert nbdkit.name() is None and len(nbdkit.timestamp()) == 26
lines = list(nbdkit._dump(b'0123456789abcdef!', 0x101, range(17)))
assert lines == [
    '00000100:    30 31 32 33 34 35 36  37 38 39 61 62 63 64 65  | 0123456789abcde|',
    '00000110: 66 21                                             |f!              |']
assert delay('d', '2') == (2, 0) and delay('d', '1.5') == (1, 500000000)
assert delay('d', '100ms') == (0, 100000000) and delay('d', '7us') == (0, 7000)
assert delay('d', '1500ns') == (0, 1500) and delay('d', '3s') == (3, 0)
assert all(fails(delay, 'd', t) for t in ('', 'x', '-1', '1.5ms', '9999999999'))
assert share('p', '30%') == 0.3 and share('p', '3:10') == 0.3 and share('p', '0:0') == 0.0
assert all(fails(share, 'p', t) for t in ('', 'x', '-1', '1:0', 'nan'))
assert nbdkit.read_password('secret') == b'secret'
assert all(fails(parse, 17, error=TypeError) for parse in (size, nbdkit.read_password))
assert all(fails(parse, 'p', 17, error=TypeError) for parse in (delay, share))
assert nbdkit.stdio_safe()
assert (nbdkit.FLAG_MAY_TRIM, nbdkit.FLAG_FUA, nbdkit.FLAG_REQ_ONE, nbdkit.FLAG_FAST_ZERO) == (1, 2, 4, 8)
assert __name__ == '__main__'
";
        let plugin = Plugin::start(script, "").await.unwrap();
        read(&plugin.device().await.unwrap(), 0, 1).await.unwrap();
    });
}

#[test]
fn callbacks_run_in_order_and_see_their_client() {
    run(|| async {
        let script = "
done = []
def config(key, value): done.append(f'{key}={value}')
def config_complete(): done.append('complete')
def get_ready(): done.append('ready')
def after_fork(): done.append('fork')
def preconnect(readonly): done.append(f'pre {readonly is False}')
def list_exports(readonly, tls): return ['a', ('b', 'second')]
def default_export(readonly, tls): return 'chosen'
def open(readonly):
    done.append(f'open {nbdkit.export_name()} {nbdkit.is_tls()}')
    return {'number': len(done)}
def pread(h, buf, offset, flags):
    assert not nbdkit.stdio_safe()
    text = ' '.join(done).encode().ljust(len(buf), b'.')
    buf[:] = text[:len(buf)]
def close(h): done.append('close')
def pwrite(h, buf, offset, flags):
    nbdkit.debug('a line')
    nbdkit.shutdown()
";
        let plugin = Plugin::start(script, "?x=1&y=a%20b").await.unwrap();
        let visit = plugin.visit().await.unwrap();
        let listed = visit.list(false).await.unwrap();
        let names: Vec<_> =
            listed.iter().map(|entry| (entry.name.as_str(), entry.description.as_str())).collect();
        assert_eq!(names, [("a", ""), ("b", "second")]);
        drop(plugin.device_of("named").await.unwrap());
        let export = visit.open("", false).await.unwrap().unwrap();
        assert_eq!(export.name, "chosen");
        let device = export.device;
        let found = String::from_utf8(read(&device, 0, 200).await.unwrap()).unwrap();
        assert_eq!(
            found.trim_end_matches('.'),
            "x=1 y=a b complete ready fork pre True pre True open named False close open chosen False"
        );
        crate::write(&device, 0, &[1]).await.unwrap();
        let reason = blockhaul_io::timeout(Duration::from_secs(10), plugin.stop).await;
        assert_eq!(reason.unwrap().unwrap(), "disk.py asks for it");
    });
}

#[test]
fn a_plugin_cleans_up_when_nobody_needs_it() {
    run(|| async {
        let mark = blockhaul_testkit::tools::ScratchDir::new().unwrap();
        let path = mark.file("mark");
        let script =
            format!("def cleanup(): print('done', file=__builtins__.open({path:?}, 'w'))\n");
        let plugin = Plugin::start(&script, "").await.unwrap();
        read(&plugin.device().await.unwrap(), 0, 1).await.unwrap();
        drop(plugin);
        while std::fs::read_to_string(&path).unwrap_or_default() != "done\n" {
            blockhaul_io::sleep(Duration::from_millis(10)).await;
        }
    });
}

#[test]
fn a_plugin_is_described_without_serving_it() {
    let scratch = blockhaul_testkit::tools::ScratchDir::new().unwrap();
    let path = scratch.file("disk.py");
    let more = "def dump_plugin(): print('answer=42')\n\
                def thread_model(): return nbdkit.THREAD_MODEL_PARALLEL\n";
    std::fs::write(&path, format!("{}{more}", crate::DISK)).unwrap();
    let text = blockhaul_python::dump(&blockhaul_python::PythonSettings::new(&path)).unwrap();
    for line in ["api_version=2", "thread_model=parallel", "answer=42", "magic_config_key=script"] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
    std::fs::write(&path, "x = 1 / 0").unwrap();
    let error = blockhaul_python::dump(&blockhaul_python::PythonSettings::new(&path)).unwrap_err();
    assert!(error.to_string().contains("ZeroDivisionError"), "{error}");
}
