# zsh reads this first, from the folder in ZDOTDIR; MINILLM_ZDOTDIR is the user's own.
lab_folder=$ZDOTDIR
lab_path=$PATH
ZDOTDIR=$MINILLM_ZDOTDIR
[[ -r $ZDOTDIR/.zshenv ]] && source $ZDOTDIR/.zshenv
MINILLM_ZDOTDIR=$ZDOTDIR
ZDOTDIR=$lab_folder
