//! How many calls a plugin accepts at a time: the models of nbdkit, which every plugin host has.

/// How many callbacks of a plugin may run at a time (nbdkit-plugin(3), "Threads"). Smaller is
/// stricter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThreadModel {
    /// One connection at a time.
    SerializeConnections,
    /// One request at a time.
    SerializeAllRequests,
    /// One request at a time of each connection.
    SerializeRequests,
    /// Any number.
    Parallel,
}

impl ThreadModel {
    const ALL: [ThreadModel; 4] = [
        ThreadModel::SerializeConnections,
        ThreadModel::SerializeAllRequests,
        ThreadModel::SerializeRequests,
        ThreadModel::Parallel,
    ];

    /// The model with nbdkit's number (`NBDKIT_THREAD_MODEL_*`).
    pub fn from_number(number: i32) -> Option<ThreadModel> {
        ThreadModel::ALL.get(usize::try_from(number).ok()?).copied()
    }

    /// The model with this name.
    pub fn from_name(name: &str) -> Option<ThreadModel> {
        ThreadModel::ALL.into_iter().find(|model| model.name() == name)
    }

    /// Its name in nbdkit.
    pub fn name(self) -> &'static str {
        match self {
            ThreadModel::SerializeConnections => "serialize_connections",
            ThreadModel::SerializeAllRequests => "serialize_all_requests",
            ThreadModel::SerializeRequests => "serialize_requests",
            ThreadModel::Parallel => "parallel",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ThreadModel;

    #[test]
    fn numbers_and_names_are_those_of_nbdkit() {
        assert_eq!(ThreadModel::from_number(0), Some(ThreadModel::SerializeConnections));
        assert_eq!(ThreadModel::from_number(3), Some(ThreadModel::Parallel));
        assert_eq!((ThreadModel::from_number(4), ThreadModel::from_number(-1)), (None, None));
        for model in ThreadModel::ALL {
            assert_eq!(ThreadModel::from_name(model.name()), Some(model));
        }
        assert_eq!(ThreadModel::from_name("Parallel"), None);
    }
}
