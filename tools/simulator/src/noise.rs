//! How bad the network is in a run.

use std::time::Duration;

use blockhaul_io::simulation::Faults;
use blockhaul_testkit::rng::Rng;

/// A network and storage for one run: from a calm one to a very bad one.
pub(crate) fn faults(rng: &mut Rng) -> Faults {
    Faults {
        short: *rng.pick(&[0, 20, 300]),
        stall: *rng.pick(&[0, 20, 300]),
        socket_delay: Duration::from_micros(*rng.pick(&[0, 20, 500, 20_000])),
        file_delay: Duration::from_micros(*rng.pick(&[20, 500, 5000])),
        cut: *rng.pick(&[0, 0, 100, 500, 2000]),
        refuse: *rng.pick(&[0, 0, 100, 500]),
    }
}

/// The same without faults that a client has to survive: slow, but whole.
pub(crate) fn calm(faults: Faults) -> Faults {
    Faults { cut: 0, refuse: 0, ..faults }
}
