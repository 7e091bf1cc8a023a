//! Between servers: payloads that stay in the kernel, and those that are looked at.

use super::*;

#[test]
fn payloads_stay_in_the_kernel_between_files_and_sockets() {
    let scratch = ScratchDir::new().unwrap();
    let source = image(&scratch);
    let targets = ["a.img", "b.img", "c.img"].map(|name| scratch.file(name));
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    let [a, b, c] = targets.each_ref().map(|path| {
        std::fs::File::create(path).unwrap().set_len(SIZE).unwrap();
        text(path)
    });
    let to_a = serve(&scratch, "a", &[a]);
    let to_b = serve(&scratch, "b", &[b]);
    let cases = [
        ("socket-to-socket", from.uri(""), to_a.uri(""), a),
        ("file-to-socket", text(&source).to_string(), to_b.uri(""), b),
        ("socket-to-file", from.uri(""), c.to_string(), c),
    ];
    for (route, from, to, target) in cases {
        let routes = routes(&mut copy(&["-S", "0", &from, &to]));
        let moved = some(&routes, route);
        // What is short, and what lies at the end, goes through memory.
        assert!(moved > SIZE / 4, "{route}: {routes:?}");
        assert_eq!(
            some(&routes, "not checked for zeroes"),
            moved + routes.get("memory").unwrap_or(&0)
        );
        let others: Vec<_> = KERNEL.into_iter().filter(|other| *other != route).collect();
        none(&routes, &others);
        assert_same(&source, Path::new(target), route);
    }
}

#[test]
fn what_is_looked_at_goes_through_memory_and_zeroes_are_counted() {
    let scratch = ScratchDir::new().unwrap();
    let source = image(&scratch);
    let target = scratch.file("target.img");
    let from = serve(&scratch, "from", &["--read-only", text(&source)]);
    let looked = routes(&mut copy(&["-S", "4096", &from.uri(""), text(&target)]));
    assert_same(&source, &target, "looked at");
    none(&looked, &KERNEL);
    none(&looked, &["not checked for zeroes", "zeroes-written"]);
    some(&looked, "skip");
    // Zeroes shorter than asked for are written, and counted.
    let coarse = routes(&mut copy(&["-S", "65536", &from.uri(""), text(&target)]));
    assert_same(&source, &target, "looked at in large blocks");
    let zeroes = some(&coarse, "zeroes-written");
    assert_eq!(some(&coarse, "memory"), some(&looked, "memory") + zeroes);
}

#[test]
fn no_zero_copy_takes_everything_through_memory() {
    let scratch = ScratchDir::new().unwrap();
    let source = image(&scratch);
    let target = scratch.file("target.img");
    let from = serve(&scratch, "from", &["--read-only", "--no-zero-copy", text(&source)]);
    let routes = routes(&mut copy(&["--no-zero-copy", "-S", "0", &from.uri(""), text(&target)]));
    assert_same(&source, &target, "through memory");
    none(&routes, &KERNEL);
    assert_eq!(some(&routes, "memory"), some(&routes, "not checked for zeroes"));
}
