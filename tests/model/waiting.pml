/* waiting.pml -- waiting for memory, or for a publication: tickets, futexes, slices, deadlines.
 *
 *   step here                function in native/ and shmcache/
 *   try, ticket              api_memory.c shmc_alloc and ticket_take; api_keys.c shmc_reserve likewise
 *   sleep                    api_memory.c shmc_wait; the kernel compares and sleeps in one step
 *   slice over, look around  _allocate.py take_memory; reservation.py wait; cache.py _reap
 *   give, release            core/chunks.c let_go, core/lock.c lock_release, api.c unlock_and_wake
 *   recover                  core/lock.c recover
 *
 * Each process wants the one block, waits for it, uses it, and gives it back. It may die at any step
 * (DEATHS in all), inside the lock too, or stop for ever (STOPS). What an operation journals is one step.
 *   without deaths, -DNO_SLICE: no wake-up is ever lost, although nobody looks again by himself
 *   with deaths: every living process gets the block; a dead waker costs one slice
 *   with a stopped holder, -DSLICES=2: nothing of it is taken, and the deadline ends each wait
 */
#ifndef PROCS
#define PROCS 3
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef STOPS
#define STOPS 0
#endif
#ifndef SLICES
#define SLICES 0        /* a timeout in slices; 0: for ever */
#endif
#define NOBODY 255
#define me _pid

byte owner = NOBODY;
bool owner_died;
byte user = NOBODY;             /* who has the block: its slot's hold */
bool waiters;
byte wake;                      /* the futex word */
bool asleep[PROCS], gone[PROCS];
byte deaths, stops, ended;

#define STEP(x) atomic { if :: x :: deaths < DEATHS -> deaths++; goto dies :: stops < STOPS -> stops++; goto stopped fi }

inline acquire() {
    atomic {
        if
        :: owner == NOBODY -> owner = me
#ifndef BUG_NO_LOCK_TIMEOUT
        :: STOPS && owner != NOBODY -> goto done                /* LockTimeoutError */
#endif
        :: deaths < DEATHS -> deaths++; goto dies
        fi;
        wakes = owner_died;
        owner_died = false
    }
}

/* wakes: something happened in this hold that waiters look for */
inline release() {
    call = false;
    if
    :: wakes && waiters ->
        STEP(waiters = false);
        STEP(wake = (wake + 1) % 8);
        call = true
    :: else
    fi;
    STEP(owner = NOBODY);
    if
#ifdef BUG_WAKES_ONE
    :: call -> STEP(if :: asleep[0] -> asleep[0] = false :: asleep[1] -> asleep[1] = false :: else -> asleep[2] = false fi)
#else
    :: call -> STEP(asleep[0] = false; asleep[1] = false; asleep[2] = false)
#endif
    :: else
    fi
}

active [PROCS] proctype process() {
    byte ticket, slices;
    bool wakes, call;

    do
    :: acquire();
       if
       :: user == NOBODY -> STEP(user = me); release(); break
       :: else ->
            STEP(waiters = true);
#ifndef BUG_TICKET_OUTSIDE
            STEP(ticket = wake);
            release();
#else
            release();
            STEP(ticket = wake);
#endif
            STEP(asleep[me] = (wake == ticket));
            if
            :: atomic { !asleep[me]; slices++ }
#ifdef LIVENESS
            :: atomic { timeout -> asleep[me] = false; slices++ }       /* a slice is longer than all else that can happen */
#else
#ifndef NO_SLICE
            :: atomic { asleep[me] -> asleep[me] = false; slices++ }
#endif
#endif
            fi;
            ticket = 0;
            if
            :: SLICES == 0 -> slices = 0
            :: SLICES && slices < SLICES
            :: SLICES && slices == SLICES -> goto done          /* None: time is up */
            fi;
#ifndef BUG_NO_REAP
            if
            :: user != NOBODY && gone[user] ->
                acquire();
                if :: user != NOBODY && gone[user] -> STEP(user = NOBODY; wakes = true) :: else fi;
                release()
            :: else
            fi
#endif
       fi
    od;

    STEP(assert(user == me));
    acquire();
    STEP(user = NOBODY; wakes = true);
    release();
    goto done;

stopped:
    ended++;
end_stopped:
    false;
dies:
    atomic {
        gone[me] = true;
        if :: owner == me -> owner = NOBODY; owner_died = true :: else fi
    };
done:
    ended++
}

#ifdef LIVENESS
ltl all_end { <> (ended == PROCS) }
#endif
