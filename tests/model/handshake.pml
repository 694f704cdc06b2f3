/* handshake.pml -- creating, attaching to and unlinking the segment of one name.
 *
 *   step here             function in shmcache/, native/
 *   acquire               _handshake.py Handshake.acquire, _open_control, names_inode
 *   create                _create.py create_segment, _fill; core/format.c shmc_format
 *   settle                _segment.py _settle; core/format.c shmc_validate
 *   claim, presence       _segment.py _claim; _handshake.py Presence.take
 *   takeover              _segment.py _settle_namespaces; core/format.c shmc_takeover
 *   remove                _create.py remove_segment, _remove_regions
 *   leave, unlink         _segment.py disconnect and _remove_if_alone; unlink and _check_removable
 *
 * An inode is a control file, and its number the generation in it. Regions are the other files, found
 * by their generation's number. Openers create or attach, use the segment and leave it; unlinkers remove
 * it when nobody is attached. Each may die at any step (DEATHS in all) or stop for ever (STOPS): then
 * its locks end, or do not. -DEPHEMERAL: who leaves last removes the segment. -DFORCED=1: unlinkers ask nobody.
 * -DNAMESPACES: openers are of two pid namespaces, in each of which the other's lock and slots mean nothing.
 * Shown: at most one generation is ever ready under the name, and who is attached is attached to it; a
 * segment that is ready has its regions; lock and slots are of the namespace of all who are attached;
 * nobody's segment is removed under him; whatever is left
 * behind is found by its name, and the next one makes do with it; everybody ends.
 */
#ifndef OPENERS
#define OPENERS 2
#endif
#ifndef UNLINKERS
#define UNLINKERS 1
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef STOPS
#define STOPS 0
#endif
#ifndef FORCED
#define FORCED 0
#endif
#define PROCS (OPENERS + UNLINKERS)
#define INODES 6
#define NOBODY 255
mtype = { EMPTY, PARTIAL, READY, UNLINKING };

byte name;                      /* the inode that it leads to; 0: none */
byte made;                      /* inodes so far */
mtype state[INODES];
byte lock[INODES] = NOBODY;     /* byte 0 of the file */
byte presence[INODES];          /* read locks on byte 1 */
byte regions;                   /* bit i: those of generation i are there */

byte users, deaths, stops, ended;

#define STEP(x) atomic { if :: x :: deaths < DEATHS -> deaths++; goto dies :: stops < STOPS -> stops++; goto stopped fi }
#define BIT(i) (1 << (i))
#ifdef NAMESPACES
#define MY_NS (me & 1)
byte ns[INODES], lock_ns[INODES];       /* as the header says; whose thread ids the lock is made for */
byte slots_ns[INODES] = NOBODY;         /* whose pids the attachment table has */
#define NS_IS_MINE(i) (ns[i] == MY_NS && lock_ns[i] == MY_NS && slots_ns[i] == MY_NS)
#else
#define NS_IS_MINE(i) true
#endif
#define IS_GENERATION(i) (name == i && state[i] == READY && (regions & BIT(i)) && NS_IS_MINE(i))

/* ino: the file that was opened and locked, and that still has the name. 0: there is none. */
inline acquire(creates) {
    do
    :: STEP(if
            :: name != 0 -> ino = name
            :: name == 0 && creates -> made++; assert(made < INODES); name = made; ino = made; state[made] = EMPTY
            :: name == 0 && !creates -> ino = 0
            fi);
       if
       :: ino == 0 -> break
       :: else
       fi;
       atomic {
           if
           :: lock[ino] == NOBODY -> lock[ino] = me
#ifndef BUG_WAITS_FOR_EVER
           :: lock[ino] != NOBODY -> ino = 0; goto done         /* LockTimeoutError */
#endif
           :: deaths < DEATHS -> deaths++; goto dies
           fi
       };
#ifndef BUG_NAME_NOT_COMPARED
       if
       :: name == ino -> break
       :: else -> STEP(lock[ino] = NOBODY)                      /* removed meanwhile: start over */
       fi
#else
       break
#endif
    od
}

inline let_go() { STEP(if :: lock[ino] == me -> lock[ino] = NOBODY :: else fi) }

inline remove() {
#ifndef BUG_REMOVAL_IS_NOT_NOTED
    if :: state[ino] == READY -> STEP(state[ino] = UNLINKING) :: else fi;
#endif
#ifndef BUG_CONTROL_FILE_FIRST
    STEP(regions = 0);          /* of every generation: all are under this name's handshake */
    STEP(if :: name == ino -> name = 0 :: else fi)
#else
    STEP(if :: name == ino -> name = 0 :: else fi);
    STEP(regions = 0)
#endif
}

inline takeover() {
#ifdef NAMESPACES
    if
    :: ns[ino] == MY_NS
#ifdef BUG_TAKEOVER_UNPROVEN
    :: ns[ino] != MY_NS ->
#else
    :: ns[ino] != MY_NS && presence[ino] != 0 -> let_go(); ino = 0; goto done     /* SegmentMismatchError */
    :: ns[ino] != MY_NS && presence[ino] == 0 ->
#endif
#ifdef BUG_NAMESPACE_FIRST
        STEP(ns[ino] = MY_NS);
#else
        STEP(ns[ino] = NOBODY);         /* who comes after a death in here takes over again */
#endif
        STEP(lock_ns[ino] = MY_NS);
        STEP(slots_ns[ino] = NOBODY);
        STEP(ns[ino] = MY_NS)
    fi
#else
    skip
#endif
}

inline create() {
    STEP(regions = 0);
    STEP(state[ino] = PARTIAL);
#ifdef NAMESPACES
    STEP(ns[ino] = MY_NS; lock_ns[ino] = MY_NS);
#endif
#ifdef BUG_READY_TOO_EARLY
    STEP(state[ino] = READY);
    STEP(regions = regions | BIT(ino))
#else
    STEP(regions = regions | BIT(ino));
    STEP(assert(name == ino && (FORCED || users == 0)); state[ino] = READY)
#endif
}

proctype opener(byte me) {
    byte ino, mine;
    bool attached;

    do
    :: acquire(true);
       if
       :: state[ino] == EMPTY -> create(); break
#ifndef BUG_STUB_IS_TAKEN_FOR_READY
       :: state[ino] == PARTIAL || state[ino] == UNLINKING -> remove(); let_go()
       :: state[ino] == READY ->
#else
       :: state[ino] == UNLINKING -> remove(); let_go()
       :: state[ino] == READY || state[ino] == PARTIAL ->
#endif
#ifdef EPHEMERAL
            if
            :: presence[ino] == 0 -> remove(); let_go()
            :: else -> takeover(); break
            fi
#else
            takeover(); break
#endif
       fi
    od;
#ifdef BUG_PRESENCE_AFTER_HANDSHAKE
    let_go();
    STEP(presence[ino]++; attached = true; users++);
    STEP(assert(IS_GENERATION(ino)));
#else
    STEP(presence[ino]++; attached = true; users++);
#ifdef NAMESPACES
    STEP(if :: slots_ns[ino] == NOBODY -> slots_ns[ino] = MY_NS :: else fi);
#endif
    STEP(assert(IS_GENERATION(ino)));           /* the slot is claimed */
    let_go();
#endif
    STEP(assert(FORCED || IS_GENERATION(ino)));         /* in use */
    STEP(presence[ino]--; attached = false; users--);
#ifdef EPHEMERAL
    mine = ino;
    acquire(false);
    if
#ifndef BUG_LAST_ONE_DOES_NOT_LOOK
    :: ino == mine && presence[ino] == 0 -> remove()
#else
    :: ino == mine -> remove()
#endif
    :: else
    fi;
    if :: ino != 0 -> let_go() :: else fi;
#endif
    goto done;
stopped:
    ended++;
end_stopped:
    false;
dies:
    /* the kernel closes its descriptors, one after the other */
    if :: attached -> atomic { presence[ino]--; users-- } :: else fi;
    if :: ino != 0 && lock[ino] == me -> lock[ino] = NOBODY :: else fi;
done:
    ended++
}

proctype unlinker(byte me) {
    byte ino;

    acquire(false);
    if
    :: ino != 0 ->
        if
        :: FORCED || presence[ino] == 0 -> remove()
        :: else                                 /* SegmentBusyError */
        fi;
        let_go()
    :: else
    fi;
    goto done;
stopped:
    ended++;
end_stopped:
    false;
dies:
    if :: ino != 0 && lock[ino] == me -> lock[ino] = NOBODY :: else fi;
done:
    ended++
}

/* The next one, undisturbed: it can attach, and after an unlink nothing is left. */
init {
    byte i;

    atomic {
        do
        :: i < OPENERS -> run opener(i); i++
        :: i >= OPENERS && i < PROCS -> run unlinker(i); i++
        :: i == PROCS -> break
        od
    };
    ended == PROCS;
    atomic {
        assert(regions == 0 || name != 0);      /* what is left can be found */
        if
        :: name != 0 && lock[name] == NOBODY -> assert(state[name] != READY || (regions & BIT(name)))
        :: else -> assert(name == 0 || stops)   /* nobody waits for the dead */
        fi
    };
    deaths = DEATHS;
    stops = STOPS;
    if
    :: name == 0 || lock[name] == NOBODY -> run opener(0); ended == PROCS + 1
    :: else
    fi
}
